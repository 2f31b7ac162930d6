"""`dflash` for clients of plain infer, which take exactly one response: it waits for the text."""

import threading

import triton_python_backend_utils as pb

from dflash_trt.errors import RequestError
from dflash_trt.serving.keys import client_of
from dflash_trt.serving.log import configure
from dflash_trt.serving.model.tensors import (
    check_parameters,
    inputs,
    named,
    parameters,
    timeout,
    to_tensors,
)
from dflash_trt.serving.model.unary import infer
from dflash_trt.serving.processes import end_with_server, hide_shared_memory


class TritonPythonModel:
    def initialize(self, args):
        end_with_server()
        hide_shared_memory()
        configure()

    def execute(self, requests):
        for request in requests:
            sender, given = request.get_response_sender(), parameters(request)
            try:
                check_parameters(given)
            except RequestError as error:
                respond(sender, ("INVALID_ARG", str(error)))
                continue
            tensors = inputs(request)
            tensors.pop("stream", None)
            call = tensors, timeout(request, given), client_of(given), named(request, given)
            # `dflash` limits how many wait
            threading.Thread(target=infer_and_respond, args=[sender, call], daemon=True).start()


def infer_and_respond(sender, call):
    respond(sender, infer(*call, sender.is_cancelled))


def respond(sender, answer):
    if isinstance(answer, tuple):
        code, message = answer
        error = pb.TritonError(message, getattr(pb.TritonError, code))
        response = pb.InferenceResponse(error=error)
    else:
        response = pb.InferenceResponse(to_tensors(answer))
    sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
