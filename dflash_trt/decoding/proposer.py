"""Proposer: drafts from the drafter's candidates, from n-gram lookup and from a grammar."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.config import Speculation
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.decoding.logits_processor import truncate
from dflash_trt.decoding.messages import Float32, Int64
from dflash_trt.decoding.sampling import SamplingParams, noise
from dflash_trt.decoding.sequence import SequenceState
from dflash_trt.engines import EngineInfo
from dflash_trt.speculation.costs import StepCosts
from dflash_trt.speculation.lookup import NgramIndex
from dflash_trt.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.speculation.proposal import Proposal, Row

ALL = 64  # candidates per draft: all that the drafter's graph returns
CANDIDATES = 8  # per draft, with the adaptive policy
LOOKED_AT = 16  # candidates per position, best first
SHARPNESS = 0.6  # trust in the best noisy candidate; fitted by replaying the demo pair


def best_chain(ids: Int64, probs: Float32) -> tuple[list[int], list[float]]:
    """Return the likeliest candidate at each position, given the one before, and their values.

    ids `[D, k]`; probs `[D, k, k]`: probability of candidate j after candidate i, rows equal at the
    first position; `[D, 1, k]` if independent of the one before. A value is the probability that a
    draft and all before it are accepted.
    """
    tokens, values, taken, value = list[int](), list[float](), 0, 1.0
    rows = zip(ids.tolist(), probs.argmax(-1).tolist(), probs.max(-1).tolist(), strict=True)
    for candidates, best, highest in rows:
        before = min(taken, len(best) - 1)
        taken, value = best[before], value * highest[before]
        tokens.append(candidates[taken])
        values.append(value)
    return tokens, values


def allowed_chain(
    matcher: Matcher, ids: Int64, probs: Float32, size: int, sampled: bool
) -> Proposal:
    """Return the likeliest chain of candidates and of tokens that the grammar forces."""
    tokens, values, forced = list[int](), list[float](), list[bool]()
    lines, candidates, taken, value = probs.tolist(), ids.tolist(), 0, 1.0

    def add(token: int, by_grammar: bool) -> None:
        tokens.append(token)
        values.append(value)
        forced.append(by_grammar)

    while len(tokens) < size:
        if must := matcher.forced_tokens(tokens):
            for token in must[: size - len(tokens)]:
                there = candidates[len(tokens)] if len(tokens) < len(candidates) else []
                taken = there.index(token) if token in there else 0
                add(token, True)
            continue
        if (depth := len(tokens)) >= len(candidates):
            break
        there, line = candidates[depth], lines[depth][min(taken, len(lines[depth]) - 1)]
        order = sorted(range(len(there)), key=line.__getitem__, reverse=True)[:LOOKED_AT]
        fitting = [i for i in order if matcher.count_allowed(tokens, [there[i]])]
        if not (mass := sum(line[i] for i in fitting)):
            break
        taken = fitting[0]
        value *= line[taken] / mass  # renormalized, as the target's choice is
        add(there[taken], False)
    return Proposal("drafter", tokens, values, sampled, forced=forced)


class Proposer:
    def __init__(
        self, max_drafts: int | None = None, *, lookup: bool = False, candidates: int = ALL
    ) -> None:
        self.candidates = candidates  # of a draft
        self._max_drafts, self._lookup = max_drafts, lookup  # max_drafts: per row
        self._texts: WeakKeyDictionary[SequenceState, NgramIndex] = WeakKeyDictionary()

    def rows(self, sequences: Sequence[SequenceState]) -> list[Row]:
        rows = []
        for sequence in sequences:
            count = sequence.budget - 1
            if self._max_drafts is not None:
                count = min(self._max_drafts, count)
            proposals, drafting = list[Proposal](), sequence.request.drafting
            sampled = bool(sequence.request.sampling.temperature)
            if count > 0 and sequence.candidates is not None:
                proposals.append(self._propose_drafts(sequence, count, sampled))
            if count > 0 and sequence.matcher is not None and drafting:
                tokens = sequence.matcher.forced_tokens(())[:count]
                n = len(tokens)
                forced = Proposal("grammar", tokens, [1.0] * n, sampled, forced=[True] * n)
                proposals += [forced] if tokens else []
            if count > 0 and self._lookup and drafting:
                proposals += self._look_up(sequence, count, sampled)
            rows.append(Row(proposals, sampled, sequence.out_of_sync and drafting))
        return rows

    def _propose_drafts(self, sequence: SequenceState, count: int, sampled: bool) -> Proposal:
        assert sequence.candidates is not None
        ids, probs = sequence.candidates
        ids, probs = ids[:count], probs[:count]
        probs = probs.reshape(len(ids), -1, ids.shape[1])  # one row, or one per candidate before
        if sampled:
            probs = _with_noise(ids, probs, sequence.request.sampling, sequence.position + 1)
        if sequence.matcher is not None:
            return allowed_chain(sequence.matcher, ids, probs, count, sampled)
        return Proposal("drafter", *best_chain(ids, probs), sampled)

    def _look_up(self, sequence: SequenceState, count: int, sampled: bool) -> list[Proposal]:
        prompt = sequence.request.prompt
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = NgramIndex(prompt)
        text.extend(sequence.tokens[len(text) - len(prompt) :])
        match, tokens = text.find(count)
        if match and sequence.matcher is not None:
            tokens = tokens[: sequence.matcher.count_allowed((), tokens)]
        if not (match and tokens):
            return []
        return [Proposal("lookup", tokens, (), sampled, match)]


def strategy(
    speculation: Speculation, target: EngineInfo, costs: StepCosts | None
) -> tuple[Policy, Proposer]:
    """Return the policy and proposer of a config; costs: for the adaptive policy."""
    if speculation.method == "none":
        return Fixed(0), Proposer()
    max_drafts = target.most_verified - 1
    if speculation.method == "ngram":
        most = min(speculation.draft_tokens or max_drafts, max_drafts)
        looked_up = Proposer(most, lookup=True, candidates=1)
        if speculation.policy == "fixed" or costs is None:
            return Fixed(most), looked_up
        return Adaptive(costs, 0, max_drafts), looked_up
    draft_tokens = min(speculation.draft_tokens or target.block_size, target.block_size - 1)
    if speculation.policy == "fixed" or costs is None:
        return Fixed(draft_tokens), Proposer()
    proposer = Proposer(max_drafts, lookup=speculation.lookup, candidates=CANDIDATES)
    return Adaptive(costs, draft_tokens, max_drafts), proposer


def _with_noise(ids: Int64, probs: Float32, sampling: SamplingParams, first_place: int) -> Float32:
    """Return the drafter's probabilities `[D, 1 or k, k]` given the target's sampling noise."""
    logits = np.log(np.maximum(probs, 1e-9)) / sampling.temperature
    weights = truncate(np.exp(logits - logits.max(-1, keepdims=True)), sampling)
    numbers = noise(sampling.seed, range(first_place, first_place + len(ids)), ids)[:, None]
    scores = np.log(np.maximum(weights, 1e-30)) + numbers
    noisy: Float32 = np.exp(SHARPNESS * (scores - scores.max(-1, keepdims=True)))
    noisy /= noisy.sum(-1, keepdims=True)
    return noisy
