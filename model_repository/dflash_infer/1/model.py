"""`dflash` for clients of plain infer, which take exactly one response: it waits for the text."""

from contextlib import closing

import triton_python_backend_utils as pb

from dflash_trt.serving.parts import arrays
from dflash_trt.serving.side_door import Knock
from dflash_trt.serving.tensors import inputs, timeout, to_tensors

POLL = 0.02  # seconds between two looks whether the client has gone


class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    tensors = {name: array for name, array in inputs(request).items() if name != "stream"}
    try:
        with closing(Knock(tensors, timeout(request))) as knock:
            while not knock.wait(POLL):
                if request.is_cancelled():
                    return failure("CANCELLED", "The request was cancelled.")
            found = knock.answer()
    except OSError:
        return failure("UNAVAILABLE", "The model dflash is not running. Try again later.")
    if isinstance(found, tuple):
        return failure(*found)
    return pb.InferenceResponse(to_tensors(arrays(found)))


def failure(code, message):
    return pb.InferenceResponse(error=pb.TritonError(message, getattr(pb.TritonError, code)))
