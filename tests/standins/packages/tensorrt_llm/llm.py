"""`LLM`, the one class that a user of the API makes."""

import itertools
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from tensorrt_llm.engine import Engine
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.llmapi.mpi_session import Session
from tensorrt_llm.results import RequestOutput
from tensorrt_llm.sampling_params import SamplingParams

DEFAULTS = {"max_batch_size": 2048, "max_num_tokens": 8192}


class LLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        explicit = {
            name: value for name, value in locals().items() if name not in ("self", "kwargs")
        }
        TorchLlmArgs(**explicit, **kwargs)
        self._args = DEFAULTS | explicit | kwargs
        if not Path(model).is_dir():  # an id on the Hub
            self._args["model"] = snapshot_download(str(model), revision=revision)
        self._engine: Engine | None = Engine(self._args)
        self._session = Session(tensor_parallel_size, self._engine.die)
        self._ids = itertools.count(1)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams,
        streaming: bool = False,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        if self._engine is None:
            raise RuntimeError("LLM is shutting down")
        params = sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be type SamplingParams, but got {type(params)}")
        if params.stop_token_ids and not params.include_stop_str_in_output:
            raise NotImplementedError("the stand-in takes no stop token away")
        if params.end_id is None and self._args["skip_tokenizer_init"]:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if type(inputs) is not list or not all(type(token) is int for token in inputs):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        most = self._args["max_num_tokens"]
        if len(inputs) > most and not self._args.get("enable_chunked_prefill"):
            raise ValueError(f"prompt length ({len(inputs)}) should not exceed {most}")
        if not isinstance(cache_salt, str | None):
            raise TypeError(f"cache_salt is {cache_salt!r}, not a str")
        output = RequestOutput(next(self._ids), inputs, params, self._engine.abort)
        self._engine.submit(output, params, streaming, cache_salt)
        return output

    def generate(
        self, inputs: list[list[int]], sampling_params: SamplingParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        outputs = [self.generate_async(each, sampling_params) for each in inputs]
        return [output.result() for output in outputs]

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return each iteration's statistics since the last call, with `enable_iter_perf_stats`."""
        assert self._engine is not None
        count = len(self._engine.stats) if self._args.get("enable_iter_perf_stats") else 0
        taken, self._engine.stats[:] = self._engine.stats[:count], []
        return taken

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None
            self._session.shutdown()
