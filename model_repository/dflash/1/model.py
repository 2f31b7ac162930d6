"""The public model: adapts Triton to dflash_trt.serving.front, which has the logic."""

import json
from dataclasses import fields
from pathlib import Path

import triton_python_backend_utils as pb

from dflash_trt.checkpoints.tokenizer import load_tokenizer
from dflash_trt.decoding.rounds import RoundOutput
from dflash_trt.serving.front import Front
from dflash_trt.serving.settings import CODED_ERRORS, Settings
from dflash_trt.serving.tensors import from_response, inputs, part_tensors, to_tensors

OUTPUTS = [field.name for field in fields(RoundOutput)]


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        settings = Settings.from_parameters(
            {key: value["string_value"] for key, value in parameters.items()}
        )
        tokenizer = load_tokenizer(Path(args["model_repository"]) / settings.tokenizer)
        self.front = Front(settings, tokenizer, run_round)

    def execute(self, requests):
        for request in requests:
            self.front.submit(inputs(request), Reply(request))

    def finalize(self):
        self.front.close()


def run_round(verify_input):
    """One round of all active sequences: one call of the ensemble verify -> draft."""
    request = pb.InferenceRequest(
        model_name="draft_verify",
        requested_output_names=OUTPUTS,
        inputs=to_tensors(verify_input),
    )
    response = request.exec()
    if response.has_error():
        raise RuntimeError(response.error().message())
    return from_response(RoundOutput, response)


class Reply:
    """dflash_trt.serving.front.Reply over Triton's response sender."""

    def __init__(self, request):
        self._sender = request.get_response_sender()
        # a BLS caller gets an error's message but not its code, so it asks for it in the message
        self._coded = CODED_ERRORS in json.loads(request.parameters() or "{}")

    def send(self, part, *, last):
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        self._sender.send(pb.InferenceResponse(part_tensors(part)), flags=flags)

    def fail(self, code, message):
        if self._coded:
            message = f"{code}: {message}"
        error = pb.TritonError(message, getattr(pb.TritonError, code))
        self._sender.send(
            pb.InferenceResponse(error=error), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    def cancelled(self):
        return self._sender.is_cancelled()
