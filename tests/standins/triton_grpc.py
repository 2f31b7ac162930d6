"""A stand-in for Triton, for what the real one cannot be brought to do in a test.

It speaks gRPC's `inference.GRPCInferenceService/ModelStreamInfer` (KServe's protocol with Triton's
streaming extension) and answers with the tensors of model_repository/dflash/config.pbtxt. A request
outside that contract is an error of the test: `requests` then raises it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import DataType
from tritonclient.utils import serialize_byte_tensor

from dflash_trt.builder.repository import TEMPLATES, read_config
from dflash_trt.request_schema import tensors
from dflash_trt.serving.keys import CLIENT, CLIENT_KEY
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.tracing import CONTEXT, HEADER

OUTPUTS = {
    each.name: DataType.Name(each.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
    for each in read_config(TEMPLATES / "dflash" / "config.pbtxt").output
}
PARAMETERS = {"timeout", "coded_errors"}
MAY_HAVE = {CLIENT, CLIENT_KEY, HEADER, *CONTEXT}

Inputs = dict[str, Any]
Answer = Callable[[Inputs, "Call"], Iterator[service_pb2.ModelStreamInferResponse]]


class Call:
    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        self._context.abort(code, message)

    def hang(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self._context.is_active() and time.monotonic() < deadline:
            time.sleep(0.01)


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that gives `answers` in order, the last one repeatedly."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self._lock = threading.Lock()
        self._faults: list[Exception] = []
        self._requests: list[Inputs] = []
        self.metadata: list[dict[str, str]] = []
        self.timeouts: list[float] = []  # seconds
        self.said: list[dict[str, str]] = []  # the parameters that may be there
        self.ended = threading.Semaphore(0)  # released whenever a call is over
        self.address = ""

    @property
    def ports(self) -> Ports:
        return Ports(1, int(self.address.rpartition(":")[2]), 1)

    @property
    def requests(self) -> list[Inputs]:
        if self._faults:
            raise self._faults[0]
        return self._requests

    def ModelStreamInfer(self, messages: Any, context: Any) -> Any:
        request = next(messages)
        with self._lock:
            answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
            self.metadata.append(dict(context.invocation_metadata()))
            try:
                self._requests.append(_inputs(request))
                self.timeouts.append(request.parameters["timeout"].int64_param / 1e6)
                found = MAY_HAVE & set(request.parameters)
                self.said.append({name: request.parameters[name].string_param for name in found})
            except Exception as fault:
                self._faults.append(fault)
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"outside the contract: {fault}")
        try:
            yield from answer(self._requests[-1], Call(context))
        finally:
            self.ended.release()


@contextmanager
def stand_in(
    *answers: Answer, credentials: grpc.ServerCredentials | None = None
) -> Iterator[StandIn]:
    """Start a stand-in at `address`, by default a free port; with credentials it requires TLS."""
    servicer = StandIn(*answers)
    server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    if credentials:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    servicer.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(0).wait(5)


def part(**values: Any) -> service_pb2.ModelStreamInferResponse:
    """Return a response with these tensors; the others are those of a short answer's end."""
    count = len(values.get("index", [0]))
    tokens = values.get("token_ids", [])
    defaults = {
        "index": [0],
        "text_output": [""] * count,
        "finish_reason": ["stop"] * count,
        "stop_word": [""] * count,
        "token_ids": tokens,
        "token_sources": [],
        "round_tokens": [],
        "prompt_tokens": [2],
        "cached_tokens": [0] * count,
        "thinking": [0],
        "completion_tokens": [len(tokens)] * count,
        **dict.fromkeys(("rounds", "drafted", "accepted"), [0] * count),
        **dict.fromkeys(("acceptance_length", "time_to_first_token"), [0.0] * count),
    }
    assert values.keys() <= OUTPUTS.keys(), "an output that the model does not have"
    response = service_pb2.ModelInferResponse(model_name="dflash", model_version="1")
    for name, value in (defaults | values).items():
        datatype = OUTPUTS[name]
        if datatype == "BYTES":
            array = np.array([text.encode() for text in value], dtype=object)
            content = serialize_byte_tensor(array).item()
        else:
            array = np.array(value, np.int32 if datatype == "INT32" else np.float32)
            content = array.tobytes()
        response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        response.raw_output_contents.append(content)
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def failure(code: str, message: str) -> Answer:
    """Return a model's error, as clients that ask for `coded_errors` get it."""

    def answer(_: Inputs, __: Call) -> Iterator[service_pb2.ModelStreamInferResponse]:
        yield error(code, message)

    return answer


def error(code: str, message: str) -> service_pb2.ModelStreamInferResponse:
    return service_pb2.ModelStreamInferResponse(error_message=f"{code}: {message}")


def parts(*responses: service_pb2.ModelStreamInferResponse) -> Answer:
    return lambda inputs, call: iter(responses)


def hanging(*responses: service_pb2.ModelStreamInferResponse) -> Answer:
    """Return these responses, then nothing until the client is gone."""

    def answer(_: Inputs, call: Call) -> Iterator[service_pb2.ModelStreamInferResponse]:
        yield from responses
        call.hang()

    return answer


def aborted(code: grpc.StatusCode) -> Answer:

    def answer(_: Inputs, call: Call) -> Iterator[service_pb2.ModelStreamInferResponse]:
        call.abort(code, "socket closed")
        yield from ()

    return answer


def _inputs(request: service_pb2.ModelInferRequest) -> Inputs:
    assert request.model_name == "dflash"
    assert set(request.parameters) - MAY_HAVE == PARAMETERS, sorted(request.parameters)
    assert request.parameters["coded_errors"].bool_param
    assert request.parameters["timeout"].int64_param > 0
    found: Inputs = {}
    # an infer result reads the tensors of any message that has outputs and their bytes
    response = service_pb2.ModelInferResponse(
        outputs=[
            service_pb2.ModelInferResponse.InferOutputTensor(
                name=each.name, datatype=each.datatype, shape=each.shape
            )
            for each in request.inputs
        ],
        raw_output_contents=request.raw_input_contents,
    )
    result = InferResult(response)
    for each in request.inputs:
        assert tensors()[each.name].datatype == each.datatype, each.name
        array = result.as_numpy(each.name)
        assert array.ndim == 1
        values = [v.decode() if isinstance(v, bytes) else v for v in array.tolist()]
        assert tensors()[each.name].is_list or len(values) == 1, each.name
        found[each.name] = values if tensors()[each.name].is_list else values[0]
    assert len({"text_input", "input_ids", "messages"} & found.keys()) == 1, "exactly one prompt"
    return found
