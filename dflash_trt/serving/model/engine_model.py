"""The base of the Triton models `verify` and `draft`: an engine, and one step per request.

Any client can reach them over gRPC; calls without the key are refused, and only Triton's own model
processes have it. A call may name another engine in the parameter `engine`, which replaces the old
one before the step. `verify` owns the `FeatureBuffer` (`model_repository/verify/1/model.py`).
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import triton_python_backend_utils as pb

from dflash_trt.engines import load_engine
from dflash_trt.errors import EngineError
from dflash_trt.serving.keys import INTERNAL_KEY, env_value, is_key
from dflash_trt.serving.log import configure
from dflash_trt.serving.model.tensors import from_request, parameters, to_tensors
from dflash_trt.serving.processes import end_with_server, hide_shared_memory

ENGINE = "engine"  # parameter of a model and of a request: a directory


class EngineModel:
    """A `TritonPythonModel` over `step`."""

    input_type: ClassVar[type[Any]]  # a named tuple of arrays, of `decoding.packing`

    def step(self, tensors: Any) -> Any:
        """Return the output for an `input_type`: a named tuple, too."""
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        env_value(INTERNAL_KEY)  # fails now if there is none
        end_with_server()
        hide_shared_memory()
        configure()
        config = json.loads(args["model_config"])["parameters"]
        engine = Path(args["model_repository"]) / config[ENGINE]["string_value"]
        self.engine = load_engine(engine.resolve(), alone=True)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        shown = pb.get_input_tensor_by_name(request, "key").as_numpy().tobytes()
        if not is_key(shown):
            message = "This model is internal. Send requests to the model dflash."
            return pb.InferenceResponse(error=pb.TritonError(message, pb.TritonError.INVALID_ARG))
        try:
            engine = parameters(request).get(ENGINE)
            if engine is not None:
                self.engine = load_engine(Path(engine), alone=True)
            output = self.step(from_request(self.input_type, request))
        except EngineError as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error)))
        except Exception as error:
            # Triton would send an exception's traceback, with server paths, to the client
            name = request.requested_output_names()
            pb.Logger.log_error(f"step for {name} failed: {type(error).__name__}: {error}")
            return pb.InferenceResponse(error=pb.TritonError("The engine step failed."))
        return pb.InferenceResponse(to_tensors(output._asdict()))
