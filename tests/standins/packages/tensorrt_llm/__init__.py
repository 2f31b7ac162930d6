"""A stand-in for TensorRT-LLM, which needs a GPU: its LLM API over our own engines.

Put this folder's parent on PYTHONPATH. `LLM` makes ONNX engines of the two checkpoints it is given
and decodes with them, so that texts are real and equal those of the CPU repository. What it takes
and gives follows the published contract, and anything else fails: an argument, a field or a method
that is not there, a value of another type.

- arguments of `LLM`: `llmapi/arguments.json`, the fields of tensorrt_llm/llmapi/llm_args.py@0004396
  (between 1.3.0rc24 and rc27), and of the documentation's DFlashDecodingConfig and
  Eagle3DecodingConfig of 1.4.0rc1; of DraftTargetDecodingConfig and NGramDecodingConfig what the
  base class and llm_args.py have
- methods of `LLM` that we call: tests/unittest/api_stability/references_committed/llm.yaml@e00a186
  and references/llm.yaml@ea35fd6; what `generate_async` does as in tensorrt_llm/llmapi/llm.py of
  2026
- `SamplingParams`: .../references_committed/sampling_params.yaml@3ba4754,
  references/sampling_params.yaml@bc531ce, checked as tensorrt_llm/sampling_params.py@a98a906 does
- `RequestOutput`, `CompletionOutput`: .../references{,_committed}/request_output.yaml@2a9abd9 and
  completion_output.yaml@0249976, @0c6a62a; how they grow: tensorrt_llm/executor/result.py@a678b91,
  where `avg_decoded_tokens_per_iter` is too
- `GuidedDecodingParams`: tensorrt_llm/sampling_params.py@000a01d
- `cached_tokens` of a result: pull request 7637, read by ai-dynamo/dynamo (pull request 13567, with
  1.3.0rc23); `cache_salt`: pull requests 7106 and 13793
- the ranks of a job that `trtllm-llmapi-launch` started: `llmapi/mpi_session.py`, over real MPI;
  they compute nothing here
- penalties with a drafter: `SpecSampler.validate_request` (pull requests 17955 and 18401)

A head of EAGLE-3 is not run: in its place, as for NGram, tokens are proposed that followed the same
ones earlier in the text. What is accepted is the stand-in's own there.

Not read, and chosen here: what the PyTorch flow says to a guide without a backend (the C++ one's
sentence). Not published, and chosen here: whether the end id is among `token_ids` (it is), and that
`request_perf_metrics` comes with the last response only.
"""

import importlib
from typing import Any

__version__ = "1.4.0rc1"
__all__ = ["LLM", "SamplingParams"]
HOMES = {"LLM": "llm", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    """Import what is used: a rank has no use for our engines."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
