"""The check of `dflash-trt verify`: DFlash against the target alone, in the same engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from dflash_trt.config import Speculation
from dflash_trt.decoding.messages import RunRound
from dflash_trt.decoding.profiling import measure
from dflash_trt.decoding.proposer import Proposer
from dflash_trt.decoding.rounds import in_process
from dflash_trt.decoding.sampling import NO_TOKEN
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request, SequenceState
from dflash_trt.decoding.strategy import strategy
from dflash_trt.engines import Engine, EngineInfo, load_engines
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.speculation import Fixed, Policy

WARM_UP_TOKENS = 16


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
    rounds = in_process(target, drafter)
    costs = measure(rounds, target.info) if speculation.policy == "adaptive" else None
    slots = target.info.slots
    dflash = _scheduler(target, slots, rounds, *strategy(speculation, target.info, costs))
    plain = _scheduler(target, 1, in_process(target, None), Fixed(0))
    requests = [Request(prompt, max_tokens) for prompt in prompts]
    for warm_up in (dflash, plain):
        _decode(warm_up, Request(requests[0].prompt, min(max_tokens, WARM_UP_TOKENS)))
    pairs = list[_Pair]()
    for index, request in enumerate(requests):
        pairs.append(_decode_both(dflash, plain, request, index))
        progress(index + 1)
    mismatches = [
        _mismatch(index, pair.fast, pair.slow, together=False) for index, pair in enumerate(pairs)
    ]
    if slots > 1:
        for index, sequence in _decode_together(dflash, requests, slots):
            mismatch = _mismatch(index, sequence, pairs[index].slow, together=True)
            mismatches[index] = mismatches[index] or mismatch
    return _report(pairs, mismatches, target.info)


@dataclass(frozen=True)
class _Pair:
    """One prompt decoded with DFlash and plain; times in seconds."""

    fast: SequenceState
    slow: SequenceState
    fast_seconds: float
    slow_seconds: float


def _decode_both(dflash: Scheduler, plain: Scheduler, request: Request, index: int) -> _Pair:
    # one after the other, so that noise of the machine affects both
    fast, fast_seconds = _decode(dflash, request)
    slow, slow_seconds = _decode(plain, request)
    if slow.finish_reason == "error":
        raise EngineError(
            f"the target's logits for prompt {index} are not finite numbers",
            "Check the weights of its checkpoint, then build again",
        )
    return _Pair(fast, slow, fast_seconds, slow_seconds)


def _decode_together(
    scheduler: Scheduler, requests: Sequence[Request], slots: int
) -> list[tuple[int, SequenceState]]:
    """Decode all requests at once, repeated to fill all slots; return them with their indices."""
    count = max(slots, len(requests))
    sequences = [
        (index, scheduler.submit(request))
        for index, request in islice(cycle(enumerate(requests)), count)
    ]
    while scheduler.has_work:
        scheduler.step()
    return sequences


def _report(
    pairs: Sequence[_Pair], mismatches: Sequence[Mismatch | None], target: EngineInfo
) -> LosslessReport:
    outputs = list[list[int]]()
    prompt_rounds = list[int]()
    committed = list[int]()
    fast_seconds = 0.0
    slow_seconds = 0.0
    for pair in pairs:
        outputs.append(pair.fast.tokens)
        prompt_rounds.append(pair.fast.rounds)
        committed += pair.fast.committed_per_round
        fast_seconds += pair.fast_seconds
        slow_seconds += pair.slow_seconds
    tokens = sum(map(len, outputs))
    return LosslessReport(
        identical=list(mismatches).count(None),
        total=len(pairs),
        together=target.slots,
        tau=(tokens - len(pairs)) / len(committed) if committed else 0.0,
        kept=_kept_fractions(committed, target.block_size),
        speedup=slow_seconds / fast_seconds,
        dflash_tokens_per_s=tokens / fast_seconds,
        plain_tokens_per_s=tokens / slow_seconds,
        outputs=outputs,
        first_mismatch=next(filter(None, mismatches), None),
        prompt_rounds=prompt_rounds,
    )


def _kept_fractions(committed: Sequence[int], block_size: int) -> list[float]:
    """Return the fraction of rounds that committed draft token 1, 2, .."""
    rounds = max(len(committed), 1)
    deepest = max([block_size, *committed])
    return [sum(count > depth for count in committed) / rounds for depth in range(1, deepest)]


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
    prompt: int, sequence: SequenceState, alone: SequenceState, *, together: bool
) -> Mismatch | None:
    """Return the first mismatch; `got` is NO_TOKEN where a failed sequence has no token."""
    for position, expected in enumerate(alone.tokens):
        got = sequence.tokens[position] if position < len(sequence.tokens) else NO_TOKEN
        if got != expected:
            return Mismatch(prompt, position, expected, got, together)
    return None
