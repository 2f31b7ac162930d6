"""`dflash-trt verify`: DFlash against the target alone, in the same engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dflash_trt.config.build import Speculation
from dflash_trt.decoding.kept_costs import costs_of
from dflash_trt.decoding.messages import RunRound
from dflash_trt.decoding.policy import Fixed, Policy
from dflash_trt.decoding.proposals import Proposer, strategy
from dflash_trt.decoding.rounds import in_process
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request
from dflash_trt.decoding.sequence import Sequence as Decoded
from dflash_trt.engines.load import load_engine
from dflash_trt.engines.step import Engine
from dflash_trt.errors import RequestError


@dataclass(frozen=True)
class Mismatch:
    """Where DFlash first left the target's own text: indices and token ids."""

    prompt: int
    position: int
    expected: int
    got: int


@dataclass(frozen=True)
class Report:
    """Greedy decoding of all prompts, both ways.

    tau is over all rounds; speedup is the median over prompts of plain time / DFlash time; kept is
    the share of rounds that committed draft token 1, 2, .. (tau = 1 + sum(kept)).
    """

    identical: int
    total: int
    tau: float
    kept: list[float]
    speedup: float
    dflash_tokens_per_s: float
    plain_tokens_per_s: float
    outputs: list[list[int]]
    first_mismatch: Mismatch | None
    rounds: int  # of all prompts with DFlash


def check(
    engines: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    speculation: Speculation,
    progress: Callable[[int], None],
) -> Report:
    """Decode each prompt with DFlash and with the target alone; stop tokens are ignored.

    `engines` holds `target/` and `drafter/`.
    `progress` is called with the number of prompts done.
    """
    if not prompts:
        raise RequestError("There are no prompts", "Give at least one line with `text` or `ids`.")
    target, drafter = (load_engine(engines / role) for role in ("target", "drafter"))
    rounds, costs = in_process(target, drafter), None
    if speculation.policy == "adaptive":
        costs = costs_of(engines, "in_process", rounds)
    dflash = _scheduler(target, rounds, *strategy(speculation, target.info, costs))
    plain = _scheduler(target, in_process(target, None), Fixed(0))
    requests = [Request(prompt, max_tokens) for prompt in prompts]
    for warm_up in (dflash, plain):
        _decode(warm_up, Request(requests[0].prompt, min(max_tokens, 16)))
    pairs: list[tuple[Decoded, Decoded]] = []
    times: list[tuple[float, float]] = []
    for done, request in enumerate(requests):
        # one after the other on each prompt, so that noise of the machine meets both
        fast, fast_seconds = _decode(dflash, request)
        slow, slow_seconds = _decode(plain, request)
        pairs.append((fast, slow))
        times.append((fast_seconds, slow_seconds))
        progress(done + 1)
    tokens = sum(len(fast.tokens) for fast, _ in pairs)
    committed = [count for fast, _ in pairs for count in fast.committed_per_round]
    rounds_run = len(committed)
    return Report(
        identical=sum(fast.tokens == slow.tokens for fast, slow in pairs),
        total=len(pairs),
        tau=(tokens - len(pairs)) / rounds_run if rounds_run else 0.0,
        kept=[
            sum(count > i for count in committed) / max(rounds_run, 1)
            for i in range(1, max([drafter.info.block_size, *committed]))
        ],
        speedup=median(slow / fast for fast, slow in times),
        dflash_tokens_per_s=tokens / sum(fast for fast, _ in times),
        plain_tokens_per_s=tokens / sum(slow for _, slow in times),
        outputs=[fast.tokens for fast, _ in pairs],
        first_mismatch=_first_mismatch(pairs),
        rounds=rounds_run,
    )


def _scheduler(
    target: Engine, rounds: RunRound, policy: Policy, proposer: Proposer | None = None
) -> Scheduler:
    return Scheduler(
        rounds,
        slots=1,
        max_seq_len=target.info.max_seq_len,
        prefill_chunk=target.info.widest,
        policy=policy,
        proposer=proposer,
    )


def _decode(scheduler: Scheduler, request: Request) -> tuple[Decoded, float]:
    start = time.perf_counter()
    sequence = scheduler.submit(request)
    while scheduler.busy:
        scheduler.step()
    return sequence, time.perf_counter() - start


def _first_mismatch(pairs: Sequence[tuple[Decoded, Decoded]]) -> Mismatch | None:
    for prompt, (fast, slow) in enumerate(pairs):
        for position, (got, expected) in enumerate(zip(fast.tokens, slow.tokens, strict=True)):
            if got != expected:
                return Mismatch(prompt, position, expected, got)
    return None
