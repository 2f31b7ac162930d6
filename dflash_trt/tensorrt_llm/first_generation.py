"""First generations of a bundle, in a separate process: TensorRT-LLM may end or stall it.

`python -m dflash_trt.tensorrt_llm.first_generation ENGINE CASES RESULT drafts|plain`

CASES is a JSON file with a list of `Case`; RESULT is written with the fields of `Generated`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.tensorrt_llm.bundle import read_llm_args, with_local_target

TOKENS = 64  # limit per prompt
STATS_TIMEOUT = 2.0  # seconds, as in upstream's tests


@dataclass(frozen=True)
class Case:
    name: str
    prompts: Sequence[list[int]]  # token ids
    at_once: int = 1  # in parallel


@dataclass(frozen=True)
class Measured:
    name: str
    texts: Sequence[list[int]] = ()
    acceptance_length: float | None = None  # None: no round drafted, or none reported
    error: str | None = None


@dataclass(frozen=True)
class Generated:
    seconds: float  # to load
    cases: list[Measured] = field(default_factory=list)


def generate(engine: Path, cases: Sequence[Case], *, plain: bool) -> Generated:
    """Answer the cases one after the other; plain: without the drafter."""
    from tensorrt_llm import LLM  # noqa: PLC0415

    started = time.monotonic()
    args = with_local_target(read_llm_args(engine)) | {"enable_iter_perf_stats": True}
    if plain:
        del args["speculative_config"]
    llm = LLM(**args)
    generated = Generated(time.monotonic() - started)
    try:
        generated.cases.extend(_measured(llm, case) for case in cases)
    finally:
        llm.shutdown()
    return generated


def _measured(llm: Any, case: Case) -> Measured:
    try:
        outputs = _answers(llm, case)
    except Exception as error:
        return Measured(case.name, error=f"{type(error).__name__}: {error}")
    stats = [entry.get("specDecodingStats") for entry in llm.get_stats(timeout=STATS_TIMEOUT)]
    drafted = [entry for entry in stats if entry and entry["numDraftTokens"] > 0]
    texts = [list(output.token_ids) for output in outputs]
    return Measured(case.name, texts, _acceptance_length(drafted))


def _answers(llm: Any, case: Case) -> list[Any]:
    from tensorrt_llm import SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    outputs = []
    for start in range(0, len(case.prompts), case.at_once):
        prompts = [*case.prompts[start : start + case.at_once]]
        for answer in llm.generate(prompts, sampling, use_tqdm=False):
            outputs.append(answer.outputs[0])
    return outputs


def _acceptance_length(drafted: Sequence[dict[str, Any]]) -> float | None:
    """Return upstream's figure (accuracy_core.py, acceptance_length.yaml); None if none drafted."""
    rounds = sum(entry["numRequestsWithDraftTokens"] for entry in drafted)
    accepted = sum(entry["numAcceptedTokens"] for entry in drafted)
    return (accepted + rounds) / rounds if rounds else None


if __name__ == "__main__":
    engine, cases, result = map(Path, sys.argv[1:4])
    tasks = [Case(**case) for case in json.loads(cases.read_text())]
    generated = generate(engine, tasks, plain=sys.argv[4] == "plain")
    result.write_text(json.dumps(asdict(generated)))
