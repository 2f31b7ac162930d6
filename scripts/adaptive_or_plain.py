"""What the adaptive policy gains or loses beside plain decoding, by sequences, tokens and arrival.

    python scripts/adaptive_or_plain.py BUILD PROMPTS [--sequences 1,2,4] [--tokens 32,96]
        [--turns 9] [--temperature T] [--top-p P] [--top-k K] [--json FILE]

In each turn both decode the same texts, greedy or sampled, with the build's engines, in one process
and in changing order: a step of each in turn, or one after the other if the build has too few
slots. Sequences arrive together, or one by one while the first one runs. Printed are medians over
turns of the time of plain decoding over that of the policy.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median

from dflash_trt.bench import load_task
from dflash_trt.builder import read_manifest, speculation_of
from dflash_trt.decoding import (
    Request,
    RunRound,
    SamplingParams,
    Scheduler,
    in_process,
    measure,
    strategy,
)
from dflash_trt.decoding.proposer import Proposer
from dflash_trt.engines import load_engines, read_infos
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.machine import cpu_model
from dflash_trt.speculation import Fixed, Policy

MOST_PROMPTS = 256
ARRIVALS = ("together", "one by one")


@dataclass(frozen=True)
class Setting:
    sequences: int
    tokens: int
    arrival: str


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn, and the seconds of them by part."""

    seconds: float
    prefill: float
    draft: float
    rounds: int
    drafted: int


@dataclass(frozen=True)
class Result:
    setting: Setting
    ratio: float  # of plain decoding's time to the policy's
    plain: list[Turn]
    adaptive: list[Turn]


class Decoding:
    """One turn of a scheduler, step by step."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request], arrival: str) -> None:
        self._scheduler = scheduler
        self._waiting = list(requests)
        self._together = arrival == "together"
        # tokens of the first text between two arrivals
        self._apart = max(1, requests[0].max_tokens // (2 * len(requests)))
        self._sequences = [scheduler.submit(self._waiting.pop(0))]
        self._seconds = 0.0
        self._prefill = 0.0
        self._draft = 0.0
        self._rounds = 0

    @property
    def goes_on(self) -> bool:
        return self._scheduler.has_work or len(self._waiting) > 0

    def step(self) -> None:
        first = len(self._sequences[0].tokens)
        while self._waiting and (self._together or first >= self._apart * len(self._sequences)):
            self._sequences.append(self._scheduler.submit(self._waiting.pop(0)))
        began = time.perf_counter()
        self._scheduler.step()
        seconds = time.perf_counter() - began
        self._seconds += seconds
        report = self._scheduler.report
        if report is not None and report.prompt_tokens:
            self._prefill += seconds
        elif report is not None:
            self._rounds += 1
            self._draft += report.draft_seconds

    def turn(self) -> Turn:
        drafted = sum(sequence.drafted for sequence in self._sequences)
        return Turn(self._seconds, self._prefill, self._draft, self._rounds, drafted)


def decode(
    schedulers: Sequence[Scheduler], requests: Sequence[Request], arrival: str, *, by_step: bool
) -> list[Turn]:
    """Decode the same texts with each; by_step: step for step, so that both meet the same load."""
    decodings = [Decoding(scheduler, requests, arrival) for scheduler in schedulers]
    groups = [decodings] if by_step else [[decoding] for decoding in decodings]
    for group in groups:
        while any(decoding.goes_on for decoding in group):
            for decoding in group:
                if decoding.goes_on:
                    decoding.step()
    return [decoding.turn() for decoding in decodings]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--sequences", default="1,2,4,8,16,32")
    parser.add_argument("--tokens", default="32,96,384")
    parser.add_argument("--arrivals", default=",".join(ARRIVALS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sampling = SamplingParams(options.temperature, top_p=options.top_p, top_k=options.top_k)
    manifest = read_manifest(options.build)
    use_one_pool(read_infos(options.build / "engines")[0].cpu_threads)
    target, drafter = load_engines(options.build / "engines")
    speculation = speculation_of(manifest)
    profile = measure(in_process(target, drafter), target.info)
    sizes = [int(number) for number in options.sequences.split(",")]
    lengths = [int(number) for number in options.tokens.split(",")]
    prompts = load_task(
        str(options.prompts),
        options.build / "tokenizer",
        vocab_size=target.info.vocab_size,
        longest=target.info.max_seq_len - max(lengths),
        count=MOST_PROMPTS,
    )
    print(f"{cpu_model()}; plain over adaptive, medians of {options.turns} turns")
    results = []
    for size, length, arrival in product(sizes, lengths, options.arrivals.split(",")):
        setting = Setting(size, length, arrival)

        by_step = 2 * size <= target.info.slots

        def scheduler(
            rounds: RunRound,
            first_slot: int,
            policy: Policy,
            proposer: Proposer | None = None,
            size: int = size,
        ) -> Scheduler:
            return Scheduler(
                rounds,
                slots=size,
                first_slot=first_slot,
                max_seq_len=target.info.max_seq_len,
                prefill_chunk=target.info.widest,
                policy=policy,
                proposer=proposer,
            )

        adaptive = scheduler(
            in_process(target, drafter), 0, *strategy(speculation, target.info, profile)
        )
        plain = scheduler(in_process(target, None), size if by_step else 0, Fixed(0))
        warming = scheduler(in_process(target, None), 0, Fixed(0))
        texts = cycle(prompts)
        turns: dict[Scheduler, list[Turn]] = {plain: [], adaptive: []}
        for number in range(options.turns):
            chosen = list(islice(texts, size))
            # the first to run a shape binds its buffers: neither of the two should
            first_tokens = [Request(prompt, 1) for prompt in chosen]
            decode([warming, plain], first_tokens, arrival="together", by_step=False)
            requests = [
                Request(prompt, length, replace(sampling, seed=seed))
                for seed, prompt in enumerate(chosen)
            ]
            order = [plain, adaptive] if number % 2 else [adaptive, plain]
            decoded = decode(order, requests, arrival, by_step=by_step)
            for scheduled, turn in zip(order, decoded, strict=True):
                turns[scheduled].append(turn)
        pairs = zip(turns[plain], turns[adaptive], strict=True)
        ratio = median(slow.seconds / fast.seconds for slow, fast in pairs)
        results.append(Result(setting, ratio, turns[plain], turns[adaptive]))
        drafted = sum(turn.drafted for turn in turns[adaptive])
        parts = {
            name: median(
                getattr(a, name) / p.seconds
                for p, a in zip(turns[plain], turns[adaptive], strict=True)
            )
            for name in ("prefill", "draft")
        }
        before = median(turn.prefill / turn.seconds for turn in turns[plain])
        print(
            f"{size:3} sequences {length:4} tokens {arrival:11} {ratio:.3f}   drafted {drafted:5} "
            f"draft {parts['draft']:.3f} prefill {parts['prefill']:.3f} ({before:.3f})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
