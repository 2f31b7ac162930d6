"""The check of `dflash-trt verify`: DFlash against the target alone, in the same engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from dflash_trt.config import Speculation
from dflash_trt.decoding.messages import RunRound
from dflash_trt.decoding.profiling import measure
from dflash_trt.decoding.proposer import Proposer, strategy
from dflash_trt.decoding.rounds import in_process
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request, SequenceState
from dflash_trt.engines import Engine, load_engines
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.speculation import Fixed, Policy


@dataclass(frozen=True)
class Mismatch:
    """The first difference from the target's own text: indices and token ids."""

    prompt: int
    position: int
    expected: int
    got: int
    together: bool  # only when decoded in a batch; alone it matched


@dataclass(frozen=True)
class LosslessReport:
    """Results of greedy decoding of all prompts: with DFlash alone and batched, and plain."""

    identical: int  # prompts whose text matches both times
    total: int
    together: int  # batch size; what follows is of one sequence at a time
    tau: float  # over all rounds
    kept: list[float]  # fraction of rounds that committed draft token 1, 2, ..: tau = 1 + sum(kept)
    speedup: float  # dflash_tokens_per_s / plain_tokens_per_s
    dflash_tokens_per_s: float
    plain_tokens_per_s: float
    outputs: list[list[int]]
    first_mismatch: Mismatch | None
    prompt_rounds: list[int]  # rounds of each prompt with DFlash

    @property
    def rounds(self) -> int:
        return sum(self.prompt_rounds)


def check_lossless(
    engines: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    speculation: Speculation,
    progress: Callable[[int], None],
) -> LosslessReport:
    """Decode each prompt with DFlash and plain, then all with DFlash in all slots.

    Stop tokens are ignored. `engines` holds `target/` and `drafter/`. `progress` gets the number of
    prompts done.
    """
    if not prompts:
        raise RequestError("There are no prompts", "Give at least one line with `text` or `ids`.")
    target, drafter = load_engines(engines)
    rounds, costs = in_process(target, drafter), None
    if speculation.policy == "adaptive":
        costs = measure(rounds, target.info)
    slots = target.info.slots
    dflash = _scheduler(target, slots, rounds, *strategy(speculation, target.info, costs))
    plain = _scheduler(target, 1, in_process(target, None), Fixed(0))
    requests = [Request(prompt, max_tokens) for prompt in prompts]
    for warm_up in (dflash, plain):
        _decode(warm_up, Request(requests[0].prompt, min(max_tokens, 16)))
    pairs: list[tuple[SequenceState, SequenceState]] = []
    times: list[tuple[float, float]] = []
    for done, request in enumerate(requests):
        # alternate on each prompt, so that noise of the machine affects both
        fast, fast_seconds = _decode(dflash, request)
        slow, slow_seconds = _decode(plain, request)
        if slow.finish_reason == "error":
            raise EngineError(
                f"the target's logits for prompt {done} are not finite numbers",
                "Check the weights of its checkpoint, then build again",
            )
        pairs.append((fast, slow))
        times.append((fast_seconds, slow_seconds))
        progress(done + 1)
    mismatches = [_mismatch(i, fast, slow, together=False) for i, (fast, slow) in enumerate(pairs)]
    # repeat prompts to fill all slots
    again = islice(cycle(enumerate(requests)), max(slots, len(requests)) if slots > 1 else 0)
    together = [(i, dflash.submit(request)) for i, request in again]
    while dflash.has_work:
        dflash.step()
    for i, sequence in together:
        mismatches[i] = mismatches[i] or _mismatch(i, sequence, pairs[i][1], together=True)
    tokens = sum(len(fast.tokens) for fast, _ in pairs)
    fast_total, slow_total = (sum(seconds) for seconds in zip(*times, strict=True))
    committed = [count for fast, _ in pairs for count in fast.committed_per_round]
    rounds_run = len(committed)
    return LosslessReport(
        identical=mismatches.count(None),
        total=len(pairs),
        together=slots,
        tau=(tokens - len(pairs)) / rounds_run if rounds_run else 0.0,
        kept=[
            sum(count > i for count in committed) / max(rounds_run, 1)
            for i in range(1, max([target.info.block_size, *committed]))
        ],
        speedup=slow_total / fast_total,
        dflash_tokens_per_s=tokens / fast_total,
        plain_tokens_per_s=tokens / slow_total,
        outputs=[fast.tokens for fast, _ in pairs],
        first_mismatch=next(filter(None, mismatches), None),
        prompt_rounds=[len(fast.committed_per_round) for fast, _ in pairs],
    )


def _scheduler(
    target: Engine, slots: int, rounds: RunRound, policy: Policy, proposer: Proposer | None = None
) -> Scheduler:
    return Scheduler(
        rounds,
        slots=slots,
        max_seq_len=target.info.max_seq_len,
        prefill_chunk=target.info.widest,
        policy=policy,
        proposer=proposer,
    )


def _decode(scheduler: Scheduler, request: Request) -> tuple[SequenceState, float]:
    start = time.perf_counter()
    sequence = scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    return sequence, time.perf_counter() - start


def _mismatch(
    prompt: int, found: SequenceState, alone: SequenceState, *, together: bool
) -> Mismatch | None:
    """Return the first mismatch; `got` is -1 where a failed sequence has no token."""
    for position, expected in enumerate(alone.tokens):
        got = found.tokens[position] if position < len(found.tokens) else -1
        if got != expected:
            return Mismatch(prompt, position, expected, got, together)
    return None
