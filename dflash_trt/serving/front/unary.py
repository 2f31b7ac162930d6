"""Client of `dflash` for plain infer, over gRPC, in the process of `dflash_infer`.

A call between Triton models cannot be cancelled, loses error codes, and in Triton 2.51 a decoupled
one sometimes crashes the calling process.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_trt.build.settings import CODED_ERRORS
from dflash_trt.request_schema import encode_bytes_tensor, tensors
from dflash_trt.serving.client import MODEL, Tls, open_channel, read_tensor, split_error
from dflash_trt.serving.internal import GRPC

log = logging.getLogger(__name__)

DEFAULT = '{"address": "127.0.0.1:8001", "headers": {}, "tls": null}'  # under a bare Triton
LOOK = 0.02  # seconds between checks for cancellation
Arrays = dict[str, "np.ndarray[Any, Any]"]
Answer = Arrays | tuple[str, str]  # output tensors, or an error's code and message


class UnaryClient:
    """Sends requests to `dflash` over the server's own gRPC port, any number at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="unary", daemon=True).start()
        self._stub: Any = None

    def ask(
        self,
        inputs: Mapping[str, "np.ndarray[Any, Any]"],
        parameters: Mapping[str, Any],
        timeout: float | None,
        cancelled: Any,
        respond: Any,
    ) -> None:
        """Call `respond` with the answer in another thread; stops once `cancelled`."""
        request = service_pb2.ModelInferRequest(model_name=MODEL)
        for name, array in inputs.items():
            kind = tensors()[name].datatype
            request.inputs.add(name=name, datatype=kind, shape=array.shape)
            content = array.tobytes()
            if kind == "BYTES":
                content = encode_bytes_tensor(array.ravel().tolist())
            request.raw_input_contents.append(content)
        for name, value in {**parameters, CODED_ERRORS: True}.items():
            kind = {bool: "bool_param", int: "int64_param"}.get(type(value), "string_param")
            setattr(request.parameters[name], kind, value)
        if timeout is not None:
            request.parameters["timeout"].int64_param = max(1, round(timeout * 1e6))
        asyncio.run_coroutine_threadsafe(self._ask(request, cancelled, respond), self._loop)

    async def _ask(self, request: Any, cancelled: Any, respond: Any) -> None:
        try:
            answer = await self._answer(request, cancelled)
        except grpc.aio.AioRpcError:
            log.warning("the model dflash is not running")
            answer = "UNAVAILABLE", "The model dflash is not running. Try again later."
        except Exception:
            log.exception("a request could not be answered")
            answer = "INTERNAL", "The request failed. The server's log says why."
        respond(answer)

    async def _answer(self, request: Any, cancelled: Any) -> Answer:
        if self._stub is None:  # in the loop's thread
            how = json.loads(os.environ.get(GRPC, DEFAULT))
            channel = open_channel(grpc.aio, how["address"], how["tls"] and Tls(**how["tls"]))
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            self._metadata = list(how["headers"].items())
        call = self._stub.ModelStreamInfer(iter([request]), metadata=self._metadata)
        reading = asyncio.ensure_future(call.read())
        try:
            while not (await asyncio.wait([reading], timeout=LOOK))[0]:
                if cancelled():
                    return "CANCELLED", "The request was cancelled."
            response = reading.result()
        finally:
            call.cancel()
        if response is grpc.aio.EOF:
            return "UNAVAILABLE", "The model dflash has ended. Try again later."
        if response.error_message:
            return split_error(response.error_message)
        outputs = response.infer_response
        pairs = zip(outputs.outputs, outputs.raw_output_contents, strict=True)
        return {output.name: read_tensor(output, content) for output, content in pairs}
