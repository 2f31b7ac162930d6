"""The public model: Triton around dflash_trt.serving.model.request_handler, which has the logic."""

import json
from pathlib import Path

import triton_python_backend_utils as pb

from dflash_trt.chat import has_channels, load_chat_template
from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.decoding.packing import (
    CheckedTensors,
    DraftTensors,
    RoundResultTensors,
    nothing_to_draft,
    pack_round,
    unpack_result,
)
from dflash_trt.errors import RequestError
from dflash_trt.serving.answer import to_arrays
from dflash_trt.serving.keys import client_of, key_tensor
from dflash_trt.serving.log import configure
from dflash_trt.serving.model import llm
from dflash_trt.serving.model.engine_loop import EngineGoneError, EngineLoop, RoundsInProcess
from dflash_trt.serving.model.engine_model import ENGINE
from dflash_trt.serving.model.metrics import Metrics
from dflash_trt.serving.model.request_handler import RequestHandler
from dflash_trt.serving.model.tensors import (
    check_parameters,
    from_response,
    inputs,
    named,
    parameters,
    timeout,
    to_tensors,
)
from dflash_trt.serving.model.unary import start_listener
from dflash_trt.serving.processes import end_with_server, hide_shared_memory
from dflash_trt.tensorrt_llm import KIND, read_llm_args
from dflash_trt.wire import CODED_ERRORS, Settings

# in Triton's errors while `verify` or `draft` is not running
GONE = "not healthy", "not ready", "unknown model"


class TritonPythonModel:
    def initialize(self, args):
        end_with_server()
        hide_shared_memory()
        configure()
        parameters = json.loads(args["model_config"])["parameters"]
        parameters = {key: value["string_value"] for key, value in parameters.items()}
        here = Path(args["model_repository"])
        if parameters["mode"] == KIND:
            parameters |= llm.limits(read_llm_args(here / parameters["engines"] / KIND))
        settings = Settings.from_parameters(parameters)
        folder = here / settings.tokenizer
        tokenizer = load_tokenizer(folder)
        self.metrics = Metrics(pb, settings.max_draft_tokens, rounds=settings.mode != KIND)
        self.handler = RequestHandler(
            settings,
            tokenizer,
            load_chat_template(folder),
            decoder(settings, here, self.metrics, tokenizer),
            self.metrics,
        )
        self.listener = start_listener(self.handler)

    def execute(self, requests):
        for request in requests:
            given = parameters(request)
            reply = Reply(request, coded=CODED_ERRORS in given)
            try:
                check_parameters(given)
            except RequestError as error:
                reply.fail("INVALID_ARG", str(error))
                continue
            client, name = client_of(given), named(request, given)
            self.handler.submit(inputs(request), reply, timeout(request, given), client, name)

    def finalize(self):
        self.listener.close()
        self.handler.close()
        self.metrics.close()


def decoder(settings, here, metrics, tokenizer):
    """By the build's mode."""
    engines = (here / settings.engines).resolve()
    if settings.mode == KIND:
        args = read_llm_args(engines / KIND)
        return llm.TensorRTLLM(settings, args, metrics, channels=has_channels(tokenizer))
    rounds = Ensemble() if settings.mode == "ensemble" else RoundsInProcess(engines)
    return EngineLoop(settings, engines, rounds, metrics, tokenizer)


class Ensemble:
    """Rounds of Triton's models."""

    def __call__(self, round):
        """One round of all active sequences: the ensemble verify -> draft, or verify alone."""
        model, output = "verify", CheckedTensors
        if round.needs_drafter:
            model, output = "draft_verify", RoundResultTensors
        response = call(model, pack_round(round), output)
        return unpack_result(from_response(output, response), round)

    def load_drafter(self, engine):
        call("draft", nothing_to_draft(), DraftTensors, {ENGINE: str(engine)})


def call(model, tensors, output, parameters=None):
    request = pb.InferenceRequest(
        model_name=model,
        requested_output_names=list(output._fields),
        inputs=to_tensors({"key": key_tensor(), **tensors._asdict()}),
        parameters=parameters,
    )
    try:
        response = request.exec()
    except pb.TritonModelException as error:  # while this model is being loaded
        raise EngineGoneError(str(error)) from error
    if response.has_error():
        message = response.error().message()
        if any(words in message for words in GONE):
            raise EngineGoneError(message)
        raise RuntimeError(message)
    return response


class Reply:
    """dflash_trt.serving.model.response_sender.Reply over Triton's response sender."""

    def __init__(self, request, coded):
        self._sender = request.get_response_sender()
        # errors in a gRPC stream have no code: a client may ask for it in the message
        self._coded = coded

    def send(self, chunks, *, last):
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        response = pb.InferenceResponse(to_tensors(to_arrays(chunks)))
        self._sender.send(response, flags=flags)

    def fail(self, code, message):
        if self._coded:
            message = f"{code}: {message}"
        error = pb.TritonError(message, getattr(pb.TritonError, code))
        self._sender.send(
            pb.InferenceResponse(error=error), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    def cancelled(self):
        return self._sender.is_cancelled()
