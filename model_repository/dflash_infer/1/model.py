"""`dflash` for clients of plain infer, which take exactly one response: it waits for the text."""

import logging
import threading
from contextlib import closing

import triton_python_backend_utils as pb

from dflash_trt.serving.front.request_output import arrays
from dflash_trt.serving.front.tensors import context, inputs, named, parameters, timeout, to_tensors
from dflash_trt.serving.front.unary import UnaryCall
from dflash_trt.serving.internal import client_of, hide_shared_memory
from dflash_trt.serving.log import configure

log = logging.getLogger(__name__)

LOOKS = 1000  # most times a second that Triton is asked whether a client has gone: 0.04 ms each


class TritonPythonModel:
    def initialize(self, args):
        hide_shared_memory()
        configure()

    def execute(self, requests):
        for request in requests:
            tensors = inputs(request)
            tensors.pop("stream", None)
            client = client_of(parameters(request))
            call = tensors, timeout(request), client, named(request), context(request)
            # any number may wait; how many is the front's to decide
            threading.Thread(
                target=respond, args=[request.get_response_sender(), call], daemon=True
            ).start()


def respond(sender, call):
    try:
        response = ask(sender, call)
    except OSError:
        log.warning("the model dflash is not running", extra={"request_id": call[3]})
        response = failure("UNAVAILABLE", "The model dflash is not running. Try again later.")
    except Exception:
        log.exception("a request could not be answered", extra={"request_id": call[3]})
        response = failure("INTERNAL", "The request failed. The server's log says why.")
    sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def ask(sender, call):
    with closing(UnaryCall(*call)) as call:
        while not call.wait(max(0.02, threading.active_count() / LOOKS)):
            if sender.is_cancelled():
                return failure("CANCELLED", "The request was cancelled.")
        found = call.answer()
    if isinstance(found, tuple):
        return failure(*found)
    return pb.InferenceResponse(to_tensors(arrays(found)))


def failure(code, message):
    return pb.InferenceResponse(error=pb.TritonError(message, getattr(pb.TritonError, code)))
