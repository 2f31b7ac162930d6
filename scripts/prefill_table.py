"""What prompts cost those that decode, and themselves: the table "Prompts under load" of
docs/benchmarks.md.

    python scripts/prefill_table.py BUILD [--prompt 192] [--tokens 24] [--turns 3]

As many texts as the build has slots come at once, and are decoded without drafts in this process:
with prompt chunks of `serving.prefill_chunk`, and beside sequences that decode of so many tokens at
least, in turns and in another order each time.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from bench_table import PAGE, fill

from dflash_trt.bench import Table
from dflash_trt.decoding import Request, RunRound, Scheduler, in_process, scheduler
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines import EngineInfo, load_engines
from dflash_trt.machine import versions

CHUNK, LEAST, DICE = 256, (256, 128, 64), Random(0)
COLUMNS = ("first token, median", "the last text's", "longest wait for a next token", "all")


class Found(NamedTuple):
    """Seconds: the median and the last first token, the longest wait for a next one, and all."""

    first: float
    last: float
    gap: float
    all: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--prompt", type=int, default=192, help="tokens")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    target, drafter = load_engines(asked.build / "engines")
    info, rounds = target.info, in_process(target, drafter)
    found = defaultdict[int, list[Found]](list)
    for _ in range(asked.turns):
        for least in DICE.sample(LEAST, len(LEAST)):
            scheduler.LEAST_CHUNK = least
            requests = [
                Request(DICE.choices(range(info.vocab_size), k=asked.prompt), asked.tokens)
                for _ in range(info.slots)
            ]
            found[least].append(load(rounds, info, requests))
            print(least, found[least][-1], flush=True)
    rows = []
    for least in LEAST:
        first, last, gap, all_ = map(median, zip(*found[least], strict=True))
        seconds = (f"{first:.1f}", f"{last:.1f}", f"{gap:.2f}", f"{all_:.1f}")
        rows.append(dict(zip(("chunks of", *COLUMNS), (str(least), *seconds), strict=True)))
    note = (
        f"Seconds, medians of {asked.turns} turns: {info.slots} texts of {asked.prompt} tokens "
        f"and {asked.tokens} of their answers, all at once, no drafts, {info.cpu_threads} threads."
    )
    fill(PAGE, Path(__file__).name, versions(), Table("Prompts under load", note, rows))


def load(rounds: RunRound, info: EngineInfo, requests: list[Request]) -> Found:
    """Decode all of them, which came now."""
    sizes = {"slots": info.slots, "max_seq_len": info.max_seq_len, "prefill_chunk": CHUNK}
    decoder = Scheduler(rounds, **sizes, policy=Fixed(0))
    sequences = [decoder.submit(request) for request in requests]
    start, gaps = time.perf_counter(), list[float]()
    firsts, lasts = list[float](), dict[int, float]()
    while decoder.busy:
        advanced = decoder.step()
        now = time.perf_counter() - start
        for index in map(sequences.index, advanced):
            if index in lasts:
                gaps.append(now - lasts[index])
            else:
                firsts.append(now)
            lasts[index] = now
    return Found(median(firsts), max(firsts), max(gaps), max(lasts.values()))


if __name__ == "__main__":
    main()
