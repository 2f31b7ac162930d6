"""`dflash` for clients of plain infer, which take exactly one response: it waits for the text."""

from functools import partial

import triton_python_backend_utils as pb

from dflash_trt.errors import RequestError
from dflash_trt.serving.front.tensors import (
    check_parameters,
    inputs,
    parameters,
    timeout,
    to_tensors,
)
from dflash_trt.serving.front.unary import UnaryClient
from dflash_trt.serving.internal import end_with_server, hide_shared_memory
from dflash_trt.serving.log import configure


class TritonPythonModel:
    def initialize(self, args):
        end_with_server()
        hide_shared_memory()
        configure()
        self.client = UnaryClient()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            answer = partial(respond, sender)
            try:
                check_parameters(request)
            except RequestError as error:
                answer(("INVALID_ARG", str(error)))
                continue
            tensors, said = inputs(request), parameters(request)
            tensors.pop("stream", None)
            said.setdefault("x-request-id", request.request_id())
            self.client.ask(tensors, said, timeout(request), sender.is_cancelled, answer)


def respond(sender, answer):
    if isinstance(answer, tuple):
        code, message = answer
        error = pb.TritonError(message, getattr(pb.TritonError, code))
        response = pb.InferenceResponse(error=error)
    else:
        response = pb.InferenceResponse(to_tensors(answer))
    sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
