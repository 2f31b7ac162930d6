"""What the adaptive policy gains or loses beside plain decoding, by sequences, tokens and arrival.

    python scripts/adaptive_or_plain.py BUILD PROMPTS [--sequences 1,2,4] [--tokens 32,96]
        [--turns 9] [--json FILE]

In each turn both decode the same greedy texts with the build's engines, in one process, one after
the other and in changing order. Sequences arrive together, or one by one while the first one runs.
Printed are medians over turns of the time of plain decoding over that of the policy.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median

from dflash_trt.bench import load_task
from dflash_trt.builder import read_manifest, speculation_of
from dflash_trt.decoding import Request, RunRound, Scheduler, in_process, measure, strategy
from dflash_trt.engines import load_engines, read_infos
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.machine import cpu_model
from dflash_trt.speculation import Fixed

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


def decode(scheduler: Scheduler, requests: Sequence[Request], arrival: str) -> Turn:
    waiting = list(requests)
    together = arrival == "together"
    apart = max(1, requests[0].max_tokens // (2 * len(requests)))  # tokens of the first text
    start = time.perf_counter()
    sequences = [scheduler.submit(waiting.pop(0))]
    prefill = draft = 0.0
    rounds = 0
    while scheduler.has_work or waiting:
        first = len(sequences[0].tokens)
        while waiting and (together or first >= apart * len(sequences)):
            sequences.append(scheduler.submit(waiting.pop(0)))
        began = time.perf_counter()
        scheduler.step()
        report = scheduler.report
        if report is not None and report.prompt_tokens:
            prefill += time.perf_counter() - began
        elif report is not None:
            rounds += 1
            draft += report.draft
    seconds = time.perf_counter() - start
    return Turn(seconds, prefill, draft, rounds, sum(each.drafted for each in sequences))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--sequences", default="1,2,4,8,16,32")
    parser.add_argument("--tokens", default="32,96,384")
    parser.add_argument("--arrivals", default=",".join(ARRIVALS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
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

        def scheduler(rounds: RunRound, *chosen: object, size: int = size) -> Scheduler:
            policy, proposer = chosen
            return Scheduler(
                rounds,
                slots=size,
                max_seq_len=target.info.max_seq_len,
                prefill_chunk=target.info.widest,
                policy=policy,
                proposer=proposer,
            )

        adaptive = scheduler(
            in_process(target, drafter), *strategy(speculation, target.info, profile)
        )
        plain = scheduler(in_process(target, None), Fixed(0), None)
        texts = cycle(prompts)
        turns: dict[Scheduler, list[Turn]] = {plain: [], adaptive: []}
        for number in range(options.turns):
            chosen = list(islice(texts, size))
            # the first to run a shape binds its buffers: neither of the two should
            decode(plain, [Request(prompt, 1) for prompt in chosen], arrival="together")
            requests = [Request(prompt, length) for prompt in chosen]
            order = [plain, adaptive] if number % 2 else [adaptive, plain]
            for each in order:
                turns[each].append(decode(each, requests, arrival))
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
