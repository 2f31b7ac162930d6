"""A bundle's first generation, in a process of its own: TensorRT-LLM may end it, or never return.

`python -m dflash_trt.tensorrt_llm.first_generation ENGINE RESULT < PROMPTS`

PROMPTS is JSON, lists of token ids; RESULT becomes what `Generated` holds.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_trt.tensorrt_llm.hub_cache import with_cached_target
from dflash_trt.tensorrt_llm.info import read_llm_args

TOKENS = 64  # of each prompt, at most
STATS_TIMEOUT = 2.0  # seconds, as upstream's tests wait


@dataclass(frozen=True)
class Generated:
    """Greedy, one prompt after the other; seconds are of loading."""

    prompts: int
    tokens: int
    acceptance_length: float | None  # None: no round drafted, or nothing is told of it
    seconds: float


def generate(engine: Path, prompts: list[list[int]]) -> Generated:
    """The acceptance length is upstream's, of all rounds that drafted (`accuracy_core.py` and
    `acceptance_length.yaml` of tests/integration/defs/accuracy).
    """
    from tensorrt_llm import LLM, SamplingParams  # noqa: PLC0415

    started = time.monotonic()
    llm = LLM(**with_cached_target(read_llm_args(engine)) | {"enable_iter_perf_stats": True})
    seconds = time.monotonic() - started
    try:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
        outputs = [llm.generate(prompt, sampling, use_tqdm=False) for prompt in prompts]
        stats = [each.get("specDecodingStats") for each in llm.get_stats(timeout=STATS_TIMEOUT)]
    finally:
        llm.shutdown()
    drafted = [each for each in stats if each and each["numDraftTokens"] > 0]
    rounds = sum(each["numRequestsWithDraftTokens"] for each in drafted)
    accepted = sum(each["numAcceptedTokens"] for each in drafted)
    return Generated(
        prompts=len(prompts),
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        acceptance_length=(accepted + rounds) / rounds if rounds else None,
        seconds=seconds,
    )


if __name__ == "__main__":
    found = generate(Path(sys.argv[1]), json.load(sys.stdin))
    Path(sys.argv[2]).write_text(json.dumps(asdict(found)))
