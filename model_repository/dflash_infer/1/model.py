"""`dflash` for clients of plain infer, which take exactly one response: it waits for the text."""

import threading
import uuid
from dataclasses import fields

import numpy as np
import triton_python_backend_utils as pb

from dflash_trt.serving.parts import Part
from dflash_trt.serving.settings import CODED_ERRORS

OUTPUTS = [field.name for field in fields(Part)]


CODES = ("INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED")
POLL = 0.02  # seconds between two looks whether the client has gone


class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    tensors = [tensor for tensor in request.inputs() if tensor.name() != "stream"]
    # clients choose their ids: two may have the same, and one that goes must not stop the other
    stops = any(tensor.name() == "stop" for tensor in tensors)
    name = request.request_id() if stops else uuid.uuid4().hex
    call = pb.InferenceRequest(
        model_name="dflash",
        request_id=name,
        requested_output_names=OUTPUTS,
        inputs=tensors,
        parameters={CODED_ERRORS: True},
        timeout=request.timeout(),
    )
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=[request, name, done], daemon=True)
    watcher.start()
    result = pb.InferenceResponse([])  # all that a stop gets
    try:
        for response in call.exec(decoupled=True):
            if response.has_error():
                return pb.InferenceResponse(error=decode(response.error().message()))
            if response.output_tensors():
                result = pb.InferenceResponse(response.output_tensors())
    finally:
        done.set()
        watcher.join()  # asking after a request that has been answered crashes the server
    return result


def watch(request, name, done):
    """Hand on that the client has gone: a BLS call cannot be cancelled, so `dflash` is told."""
    while not done.wait(POLL):
        if request.is_cancelled():
            call = pb.InferenceRequest(
                model_name="dflash",
                request_id=name,
                requested_output_names=[],
                inputs=[pb.Tensor("stop", np.array([True]))],
            )
            return list(call.exec(decoupled=True))


def decode(message):
    """The error with its code, which a BLS call does not hand on by itself."""
    code, _, text = message.partition(": ")
    if code in CODES:
        return pb.TritonError(text, getattr(pb.TritonError, code))
    pb.Logger.log_error(f"dflash did not answer: {message}")  # Triton's own words
    return pb.TritonError(
        "The model dflash is not running. Try again later.", pb.TritonError.UNAVAILABLE
    )
