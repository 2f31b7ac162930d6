"""A bundle's first generation, in a process of its own: TensorRT-LLM may end it, or never return.

`python -m dflash_trt.engines.tensorrt_llm.first_generation ENGINE RESULT < PROMPTS`

PROMPTS is JSON, lists of token ids; RESULT becomes what `Generated` holds.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_trt.engines.tensorrt_llm.info import read_llm_args

TOKENS = 64  # of each prompt, at most


@dataclass(frozen=True)
class Generated:
    """Greedy, one prompt after the other; seconds are of loading."""

    prompts: int
    tokens: int
    acceptance_length: float | None  # None: the results hold none
    seconds: float


def generate(engine: Path, prompts: list[list[int]]) -> Generated:
    """The acceptance length is upstream's: the requests' `avg_decoded_tokens_per_iter`, weighted by
    their rounds (`_log_spec_stats` of `tensorrt_llm/evaluate/lm_eval.py`).
    """
    from tensorrt_llm import LLM, SamplingParams  # noqa: PLC0415

    started = time.monotonic()
    llm = LLM(**read_llm_args(engine))
    seconds = time.monotonic() - started
    tokens, rounds, decoded = 0, 0, 0.0
    try:
        for prompt in prompts:
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
            output = llm.generate(prompt, sampling, use_tqdm=False)
            tokens += len(output.outputs[0].token_ids)
            if output.avg_decoded_tokens_per_iter is not None:
                weight = max(1, output.decoding_iter)
                rounds += weight
                decoded += weight * output.avg_decoded_tokens_per_iter
    finally:
        llm.shutdown()
    return Generated(len(prompts), tokens, decoded / rounds if rounds else None, seconds)


if __name__ == "__main__":
    found = generate(Path(sys.argv[1]), json.load(sys.stdin))
    Path(sys.argv[2]).write_text(json.dumps(asdict(found)))
