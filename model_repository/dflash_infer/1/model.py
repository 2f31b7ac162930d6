"""`dflash` for clients of plain infer, which take exactly one response: it waits for the text."""

from dataclasses import fields

import triton_python_backend_utils as pb

from dflash_trt.serving.parts import Part
from dflash_trt.serving.settings import CODED_ERRORS

OUTPUTS = [field.name for field in fields(Part)]


class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    tensors = [tensor for tensor in request.inputs() if tensor.name() != "stream"]
    call = pb.InferenceRequest(
        model_name="dflash",
        requested_output_names=OUTPUTS,
        inputs=tensors,
        parameters={CODED_ERRORS: True},
        timeout=request.timeout(),
    )
    for response in call.exec(decoupled=True):
        if response.has_error():
            return pb.InferenceResponse(error=decode(response.error().message()))
        if response.output_tensors():
            result = pb.InferenceResponse(response.output_tensors())
    return result


def decode(message):
    """The error with its code, which a BLS call does not hand on by itself."""
    code, _, text = message.partition(": ")
    return pb.TritonError(text, getattr(pb.TritonError, code))
