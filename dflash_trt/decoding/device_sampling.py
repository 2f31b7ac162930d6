"""Choose a round's tokens where its logits are, on a GPU, as `logits_processor` and `sampling` do.

All places of a round are chosen at once, the drafts before each taken as accepted. Masses are sums
of integers, which do not depend on their order, and so not on other rows.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dflash_trt.decoding.arrays import Int64
from dflash_trt.decoding.messages import Logprobs
from dflash_trt.decoding.place_rules import WORD, PlaceRules
from dflash_trt.decoding.sampling import (
    FIRST_FACTOR,
    HEAD,
    INSIDE,
    NO_TOKEN,
    REST,
    SECOND_FACTOR,
    STEP_FACTOR,
)
from dflash_trt.engines.gpu import Both, Gpu
from dflash_trt.engines.step import Bounded

FEW, MANY = 64, 1024  # candidates: where top-k keeps fewer than FEW, and elsewhere
UNIT = 2.0**44  # of masses: those of 2**18 tokens fit into 63 bits
REST_UNIT = 2.0**54  # of masses of tokens that weigh at most HEAD
AT_ONCE = 64  # rows of logits, of which many numbers of 8 bytes are made
CHOICES = 64  # recorded for a step


@dataclass(frozen=True)
class Plan:
    """What is computed for places of some kinds."""

    candidates: int  # the likeliest of each place
    has_greedy: bool  # whether a place has no temperature
    has_totals: bool  # whether a place needs the masses of all tokens


class Chooser:
    """Chooses tokens by a step's logits `[r, vocab]`, which stay as they are."""

    def __init__(self, gpu: Gpu, logits: Tensor) -> None:
        self._gpu = gpu
        self._logits = logits
        self._choices: Bounded[Hashable, _Choice] = Bounded(CHOICES)

    def start(self, rules: PlaceRules) -> Callable[[], Int64]:
        """Start to choose; return what waits and returns the tokens, `[m]`.

        NO_TOKEN where logits are not finite or no token is allowed.
        """
        plan = _plan(rules, self._logits.shape[1])
        padded = rules.padded()
        key = (plan, *(array.shape for array in vars(padded).values()))
        choice = self._choices.of(key, lambda: _Choice(self._gpu, self._logits, padded, plan))
        choice.start(padded)
        return partial(self._result, choice, rules, plan)

    def _result(self, choice: "_Choice", rules: PlaceRules, plan: Plan) -> Int64:
        self._gpu.wait()
        tokens, is_sure = choice.chosen.array[:, : rules.integers.shape[1]].copy()
        unsure = np.flatnonzero(is_sure == 0)
        if len(unsure):
            others = rules.only(unsure)
            whole = Plan(self._logits.shape[1], plan.has_greedy, plan.has_totals)
            again = _Choice(self._gpu, self._logits, others, whole)
            again.start(others)
            self._gpu.wait()
            tokens[unsure] = again.chosen.array[0]
        chosen: Int64 = tokens
        return chosen

    def log_probabilities(self, rows: Sequence[int], tokens: Sequence[int], count: int) -> Logprobs:
        """Return those of a token at each row of the logits, and of the `count` best there."""
        values = np.empty((len(rows), 1 + count), np.float32)
        ids = np.empty((len(rows), 1 + count), np.int64)
        for start in range(0, len(rows), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            score = partial(_score, self._logits, rows[part], tokens[part], count)
            values[part], ids[part] = (tensor.cpu().numpy() for tensor in self._gpu.run(score))
        return Logprobs(values, ids)


def _plan(rules: PlaceRules, vocab: int) -> Plan:
    top_k, sampled = rules.integers[2], rules.numbers[0] > 0
    keeps_few = (top_k > 0) & (top_k < FEW)
    needs_total = sampled & ((top_k == 0) | (top_k >= vocab))
    candidates = FEW if (keeps_few | ~sampled).all() else MANY
    return Plan(min(candidates, vocab), bool((~sampled).any()), bool(needs_total.any()))


@dataclass
class _Choice:
    """Chooses by rules of some sizes; is recorded when they come again."""

    gpu: Gpu
    logits: Tensor
    rules: PlaceRules  # of these sizes
    plan: Plan
    inputs: dict[str, Both] = field(init=False)
    chosen: Both = field(init=False)  # int64 [2, m]: tokens, and whether each is sure
    work: Callable[[], object] = field(init=False)
    starts: int = 0

    def __post_init__(self) -> None:
        self.inputs = {
            name: self._both(array.shape, array.dtype.name)
            for name, array in vars(self.rules).items()
        }
        self.chosen = self._both((2, self.rules.integers.shape[1]), "int64")
        # no method, which would keep this in a cycle, and with it memory of the GPU
        self.work = partial(_work, self.gpu, self.logits, self.inputs, self.chosen, self.plan)

    def _both(self, shape: tuple[int, ...], dtype: str) -> Both:
        return Both(self.gpu.pinned_zeros(shape, dtype), self.gpu.zeros(shape, dtype))

    def start(self, rules: PlaceRules) -> None:
        for name, array in vars(rules).items():
            self.inputs[name].array[...] = array
        if self.starts == 1:
            self.work = self.gpu.record(self.work)
        self.starts += 1
        self.gpu.run(self.work)


def _work(gpu: Gpu, logits: Tensor, inputs: dict[str, Both], chosen: Both, plan: Plan) -> None:
    for both in inputs.values():
        both.upload(gpu)
    memory = {name: both.memory for name, both in inputs.items()}
    processed = _processed(logits[memory["integers"][0]], memory)
    for start in range(0, len(processed), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        integers, numbers = memory["integers"][1:, part, None], memory["numbers"][:3, part, None]
        choice = _choose(processed[part], _Rules(*integers, *numbers), plan)
        gpu.copy(choice, chosen.memory[:, part])
    chosen.download(gpu)


def _processed(logits: Tensor, memory: dict[str, Tensor]) -> Tensor:
    """Apply masks, bias, penalties and bans to a copy of logits, in place."""
    if len(memory["masks"]):
        logits.masked_fill_(_unpacked(memory["masks"], logits.shape[1]).logical_not_(), -torch.inf)
    if memory["edits"].shape[1]:
        places, ids = memory["edited"]
        logits[places, ids] = _edited(logits[places, ids], places, memory)
    if memory["banned"].shape[1]:
        places, ids = memory["banned"]
        before = logits[places, ids]
        logits[places, ids] = torch.full_like(before, -torch.inf)
        # not where the grammar allows no others
        has_others = logits.amax(-1).isfinite()[places]
        logits[places, ids] = before.masked_fill(has_others, -torch.inf)
    return logits


def _unpacked(masks: Tensor, vocab: int) -> Tensor:
    """Unpack grammars' bits `[vocab / 32, m]` to booleans `[m, vocab]`."""
    bits = masks.T[:, :, None] >> torch.arange(WORD, device=masks.device, dtype=torch.int32)
    return (bits & 1).bool().flatten(1)[:, :vocab]


def _edited(logits: Tensor, places: Tensor, memory: dict[str, Tensor]) -> Tensor:
    """Return single logits `[e]` after bias and penalties."""
    bias, seen, counts = memory["edits"]
    repetition, presence, frequency = memory["numbers"][3:, places]
    logits = logits + bias
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen > 0, penalized, logits)
    return torch.where(counts > 0, logits - presence - frequency * counts, logits)


@dataclass(frozen=True)
class _Rules:
    bases: Tensor  # [m, 1], as all others
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True)
class _Candidates:
    """The likeliest tokens of m places, `[m, k]`: the likeliest first, of equal ones the lowest."""

    ids: Tensor
    weights: Tensor  # the largest of a place is 1
    are_all: bool

    @property
    def least(self) -> Tensor:
        """Tokens that are no candidates have this weight at most, `[m, 1]`."""
        return self.weights[:, -1:]


@dataclass(frozen=True)
class _Whole:
    """Of all tokens, `[m, 1]`."""

    mass: Tensor
    rest: Tensor  # the mass of those that min-p keeps and that weigh at most HEAD


def _choose(logits: Tensor, rules: _Rules, plan: Plan) -> Tensor:
    """Return tokens, and 1 where they are sure, `[2, m]`."""
    vocab = logits.shape[1]
    highest = logits.amax(-1, keepdim=True)
    is_greedy = rules.temperature == 0
    temperature = rules.temperature.masked_fill(is_greedy, 1)
    candidates = _likeliest(logits, highest, temperature, plan.candidates)
    whole = None
    if plan.has_totals:
        whole = _whole((logits - highest).div_(temperature).exp_(), rules.min_p)
    cuts = (rules.top_k > 0) & (rules.top_k < vocab)
    last = candidates.weights.gather(-1, (rules.top_k - 1).clamp(0, plan.candidates - 1))
    left = ~cuts | (candidates.weights >= last)
    kept = left & _in_nucleus(candidates.weights, left, rules, whole, cuts)
    is_head = kept & (candidates.weights > float(HEAD))
    rest_masses = _mass(candidates.weights, REST_UNIT).masked_fill_(~kept | is_head, 0)
    rest = rest_masses.sum(-1, keepdim=True)

    truncates = cuts | (rules.top_p < 1)
    least_kept = candidates.weights.masked_fill(~kept, 1).amin(-1, keepdim=True)
    # all tokens that rules keep, or all that weigh more than HEAD, are among the candidates
    has_all = torch.where(truncates, least_kept > candidates.least, candidates.least < rules.min_p)
    has_all &= ~cuts | (last > candidates.least)
    has_head = has_all | (~truncates & (candidates.least <= float(HEAD)))
    if candidates.are_all:
        has_all = has_head = torch.ones_like(has_all)
    elif whole is not None:
        rest = torch.where(has_all, rest, whole.rest)

    logarithms = _uniforms(candidates.ids, rules.bases).log_()
    scores = (candidates.weights.double() / logarithms).masked_fill_(~is_head, torch.inf)
    best = scores.amin(-1, keepdim=True)
    tokens = candidates.ids.masked_fill(scores != best, vocab).amin(-1, keepdim=True)
    shared = torch.arange(REST, INSIDE - 1, -1, device=logits.device)
    uniforms = _uniforms(shared, rules.bases)
    is_of_rest = rest.double() / REST_UNIT / uniforms[:, :1].log() < best
    drawn = _drawn(candidates.ids, rest_masses, uniforms[:, 1:])
    tokens = torch.where(is_of_rest, drawn, tokens)
    is_sure = has_all | (has_head & ~is_of_rest)
    if plan.has_greedy:
        tokens = torch.where(is_greedy, logits.argmax(-1, keepdim=True), tokens)
        is_sure |= is_greedy
    is_finite = highest.isfinite()
    tokens = tokens.masked_fill(~is_finite, NO_TOKEN)
    return torch.cat((tokens, (is_sure | ~is_finite).long()), -1).T


def _likeliest(logits: Tensor, highest: Tensor, temperature: Tensor, count: int) -> _Candidates:
    are_all = count == logits.shape[1]
    if are_all:
        ids = torch.arange(count, device=logits.device).expand_as(logits)
        values = logits
    else:
        values, ids = logits.topk(count, sorted=False)
        ids, order = ids.sort()
        values = values.gather(-1, order)
    weights, order = ((values - highest) / temperature).exp_().sort(descending=True, stable=True)
    return _Candidates(ids.gather(-1, order), weights, are_all)


def _whole(weights: Tensor, min_p: Tensor) -> _Whole:
    others = (weights < min_p) | (weights > float(HEAD))
    rest = _mass(weights, REST_UNIT).masked_fill_(others, 0).sum(-1, keepdim=True)
    return _Whole(_mass(weights, UNIT).sum(-1, keepdim=True), rest)


def _in_nucleus(
    weights: Tensor, left: Tensor, rules: _Rules, whole: _Whole | None, cuts: Tensor
) -> Tensor:
    """Return which of the candidates that top-k has left, top-p and then min-p keep.

    cuts `[m, 1]`: at which places it left tokens out. whole: None if it did so at all.
    """
    masses = _mass(weights, UNIT).masked_fill_(~left, 0)
    reached = masses.cumsum(-1)
    total = reached[:, -1:]
    if whole is not None:
        total = torch.where(cuts, total, whole.mass)
    border = rules.top_p * _as_float32(total)
    kept = (rules.top_p == 1) | (_as_float32(reached - masses) < border)
    return kept & (weights >= rules.min_p)


def _drawn(ids: Tensor, masses: Tensor, uniforms: Tensor) -> Tensor:
    """Return an id of each place `[m, 1]`, drawn by masses `[m, k]`, in the order of ids."""
    ids, order = ids.sort()
    reached = masses.gather(-1, order).cumsum(-1).double()
    first = (reached > uniforms * reached[:, -1:]).long().argmax(-1, keepdim=True)
    return ids.gather(-1, first)


def _mass(weights: Tensor, unit: float) -> Tensor:
    return (weights.double() * unit).round_().long()


def _as_float32(masses: Tensor) -> Tensor:
    return (masses.double() / UNIT).float()


def _uniforms(ids: Tensor, bases: Tensor) -> Tensor:
    """Hash as `sampling` does: products wrap in int64 as in uint64."""
    bits = ids * _signed(STEP_FACTOR) + bases
    bits = (bits ^ _shifted(bits, 30)) * _signed(FIRST_FACTOR)
    bits = (bits ^ _shifted(bits, 27)) * _signed(SECOND_FACTOR)
    return (_shifted(bits, 32).double() + 0.5) * 2.0**-32


def _signed(factor: int) -> int:
    return factor - (1 << 64) if factor >> 63 else factor


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _score(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids `[t, 1 + count]` of tokens and of the best."""
    of_rows = logits[torch.tensor(rows, device=logits.device)]
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    highest = of_rows.amax(-1, keepdim=True)
    total = _mass((of_rows - highest).exp_(), UNIT).sum(-1, keepdim=True)
    if count:
        ids = torch.cat((ids, _best(of_rows, count)), -1)
    values = of_rows.gather(-1, ids) - highest - (total.double() / UNIT).log_().float()
    return values, ids


def _best(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the largest, the largest first, of equal ones the lowest."""
    bits = (logits + 0.0).view(torch.int32).long()  # 0.0 for -0.0, too
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((ordered << 32) - ids).topk(count).indices
