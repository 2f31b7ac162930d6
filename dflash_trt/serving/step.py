"""What the Triton models `verify` and `draft` share: an engine, and one step of it per request."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import triton_python_backend_utils as pb

from dflash_trt.errors import RankError
from dflash_trt.serving.internal import hide_shared_memory
from dflash_trt.serving.tensors import from_request, to_tensors

LAST_WORDS = 0.2  # seconds in which the answer leaves the process


class EngineStep:
    """A `TritonPythonModel` over `step(engine, input) -> output`, named tuples of arrays."""

    load: ClassVar[Callable[[Path], Any]]
    step: ClassVar[Callable[[Any, Any], Any]]
    input_type: ClassVar[type[Any]]

    def initialize(self, args: dict[str, str]) -> None:
        hide_shared_memory()
        parameters = json.loads(args["model_config"])["parameters"]
        engine = Path(args["model_repository"]) / parameters["engine"]["string_value"]
        self.engine = type(self).load(engine.resolve())

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            output = type(self).step(self.engine, from_request(self.input_type, request))
        except Exception as error:
            # Triton would send an exception's traceback, with server paths, to the client
            name = request.requested_output_names()
            pb.Logger.log_error(f"step for {name} failed: {type(error).__name__}: {error}")
            if isinstance(error, RankError):  # `serve` starts again what ends
                threading.Timer(LAST_WORDS, os._exit, [1]).start()
            return pb.InferenceResponse(error=pb.TritonError("The engine step failed."))
        return pb.InferenceResponse(to_tensors(output._asdict()))
