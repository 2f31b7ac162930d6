"""Time the host's part of a round: `python scripts/host_part.py BUILD`.

The engines of a build compute nothing here: what is left are the scheduler, the policy, the inputs
of steps and what is made of their outputs. Every draft is accepted, so that each round has all that
a round can have. Waiting for a GPU and starting its work come on top.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.decoding import Request, Scheduler, in_process
from dflash_trt.decoding.proposer import Proposer
from dflash_trt.engines import Step, load_engines
from dflash_trt.speculation import Fixed

STREAMS = (1, 8, 32)
PROMPT = 32
BEST = ("top_ids", "top_logits", "pair_scores")  # outputs that rounds read
ROUNDS = 400


class Idle:
    """An engine whose steps do nothing: each row's best token is 0."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *sizes: int, **more: int) -> Step:
        step: Step = self._engine.step(*sizes, **more)
        for name in BEST:
            if name in step.outputs:
                step.outputs[name][...] = 0
        return replace(step, run=lambda: None)


def host_seconds(target: Any, drafter: Any, streams: int) -> list[float]:
    """Return the seconds of rounds with a whole block of drafts each."""
    info = target.info
    scheduler = Scheduler(
        in_process(target, drafter),
        slots=streams,
        max_seq_len=info.max_seq_len,
        prefill_chunk=256,
        policy=Fixed(info.block_size - 1),
        proposer=Proposer(),
    )
    length = info.max_seq_len - PROMPT - info.block_size
    times: list[float] = []
    for row in range(streams):
        scheduler.submit(Request([row + 1] * PROMPT, length))
    for _ in range(ROUNDS):
        start = time.perf_counter()
        scheduler.step()
        took = time.perf_counter() - start
        report = scheduler.report
        if report is not None and len(report.sequences) == streams and not report.prompt_tokens:
            times.append(took)
    return times


def main(build: Path) -> None:
    target, drafter = map(Idle, load_engines(build / "engines"))
    for streams in STREAMS:
        if streams > target.info.slots:
            break
        median = statistics.median(host_seconds(target, drafter, streams))
        print(f"{streams} streams: {1e3 * median:.2f} ms of the host a round")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
