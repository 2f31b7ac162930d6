"""`LLM`, the one class that a user of the API makes."""

import itertools
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from tokenizers import Tokenizer

from tensorrt_llm.engine import Engine
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
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
        self._tokenizer = None
        if not skip_tokenizer_init:
            folder = Path(tokenizer or self._args["model"])
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._engine: Engine | None = Engine(self._args)
        self._ids = itertools.count(1)

    def generate_async(
        self,
        inputs: str | list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: None = None,
        prompt_adapter_request: None = None,
        streaming: bool = False,
        kv_cache_retention_config: None = None,
        disaggregated_params: None = None,
        trace_headers: None = None,
        scheduling_params: None = None,
        conversation_params: None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        if self._engine is None:
            raise RuntimeError("LLM is shutting down")
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be type SamplingParams, but got {type(params)}")
        trims = params.stop_token_ids and not params.include_stop_str_in_output
        if params.n > 1 or params.stop or params.use_beam_search or trims:
            raise NotImplementedError("the stand-in has one sequence a request, and no stop texts")
        if params.end_id is None and self._tokenizer is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        prompt = inputs if isinstance(inputs, str) else None
        if prompt is not None:
            assert self._tokenizer is not None
            inputs = self._tokenizer.encode(prompt).ids
        if type(inputs) is not list or not all(type(token) is int for token in inputs):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        most = self._args["max_num_tokens"]
        if len(inputs) > most and not self._args.get("enable_chunked_prefill"):
            raise ValueError(f"prompt length ({len(inputs)}) should not exceed {most}")
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be a float in [0.0, 1.0], got {priority}")
        if not isinstance(cache_salt, str | None):
            raise TypeError(f"cache_salt is {cache_salt!r}, not a str")
        output = RequestOutput(
            next(self._ids), prompt, inputs, params, self._tokenizer, self._engine.abort
        )
        self._engine.submit(output, params, streaming, cache_salt)
        return output

    def generate(
        self,
        inputs: str | list[Any],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        if isinstance(inputs, str) or isinstance(inputs[0], int):
            return self.generate_async(inputs, sampling_params).result()
        outputs = [self.generate_async(each, sampling_params) for each in inputs]
        return [output.result() for output in outputs]

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Of each iteration since the last call, if `enable_iter_perf_stats`."""
        assert self._engine is not None
        count = len(self._engine.stats) if self._args.get("enable_iter_perf_stats") else 0
        taken, self._engine.stats[:] = self._engine.stats[:count], []
        return taken

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer
