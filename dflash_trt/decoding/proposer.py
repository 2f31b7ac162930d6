"""Proposer: drafts from the drafter's candidates, from n-gram lookup and from a grammar."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.decoding.arrays import Float32, Int64
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.decoding.logits_processor import truncate
from dflash_trt.decoding.messages import Candidates
from dflash_trt.decoding.sampling import SamplingParams, noise
from dflash_trt.decoding.sequence import SequenceState
from dflash_trt.speculation import Proposal, SequenceView
from dflash_trt.speculation.lookup import NgramIndex

ALL = 64  # candidates per draft: all that the drafter's graph returns
LOOKED_AT = 16  # candidates per position, best first
SHARPNESS = 0.6  # trust in the best noisy candidate; fitted by replaying the demo pair


def best_chain(ids: Int64, probs: Float32) -> tuple[list[int], list[float]]:
    """Return the likeliest candidate at each position, given the one before, and their values.

    ids `[D, k]`; probs `[D, k, k]`: probability of candidate j after candidate i, rows equal at the
    first position; `[D, 1, k]` if independent of the one before. A value is the probability that a
    draft and all before it are accepted.
    """
    tokens = list[int]()
    values = list[float]()
    taken = 0
    value = 1.0
    rows = zip(ids.tolist(), probs.argmax(-1).tolist(), probs.max(-1).tolist(), strict=True)
    for candidates, best, highest in rows:
        before = min(taken, len(best) - 1)
        taken = best[before]
        value *= highest[before]
        tokens.append(candidates[taken])
        values.append(value)
    return tokens, values


def allowed_chain(
    matcher: Matcher, ids: Int64, probs: Float32, size: int, sampled: bool
) -> Proposal:
    """Return the likeliest chain of candidates and of tokens that the grammar forces."""
    chain = _AllowedChain(matcher, ids.tolist(), probs.tolist(), size)
    while chain.extend_by_grammar() or chain.extend_by_candidate():
        pass
    return Proposal("drafter", chain.tokens, chain.values, sampled, forced=chain.forced)


class _AllowedChain:
    def __init__(
        self,
        matcher: Matcher,
        candidates: list[list[int]],
        probs: list[list[list[float]]],
        size: int,
    ) -> None:
        self.tokens: list[int] = []
        self.values: list[float] = []
        self.forced: list[bool] = []  # by the grammar
        self._matcher = matcher
        self._candidates = candidates
        self._probs = probs
        self._size = size
        self._taken = 0  # the candidate at the last position
        self._value = 1.0

    def extend_by_grammar(self) -> bool:
        """Append the tokens that the grammar forces next; return whether there are any."""
        if len(self.tokens) == self._size:
            return False
        tokens = self._matcher.forced_tokens(self.tokens)
        for token in tokens[: self._size - len(self.tokens)]:
            position = len(self.tokens)
            candidates = self._candidates[position] if position < len(self._candidates) else []
            self._taken = candidates.index(token) if token in candidates else 0
            self._append(token, forced=True)
        return bool(tokens)

    def extend_by_candidate(self) -> bool:
        """Append the likeliest allowed candidate, if there is one of some probability."""
        position = len(self.tokens)
        if position == self._size or position >= len(self._candidates):
            return False
        candidates = self._candidates[position]
        rows = self._probs[position]
        probs = rows[min(self._taken, len(rows) - 1)]
        order = sorted(range(len(candidates)), key=probs.__getitem__, reverse=True)[:LOOKED_AT]
        allowed = [
            index
            for index in order
            if self._matcher.count_allowed(self.tokens, [candidates[index]])
        ]
        mass = sum(probs[index] for index in allowed)
        if not mass:
            return False
        self._taken = allowed[0]
        self._value *= probs[self._taken] / mass  # renormalized, as the target's choice is
        self._append(candidates[self._taken], forced=False)
        return True

    def _append(self, token: int, *, forced: bool) -> None:
        self.tokens.append(token)
        self.values.append(self._value)
        self.forced.append(forced)


def view(sequence: SequenceState, proposals: Sequence[Proposal] = ()) -> SequenceView:
    """Return what decisions depend on of a sequence."""
    return SequenceView(
        proposals,
        sampled=sequence.sampled,
        drafting=sequence.request.drafting,
        always_drafts=sequence.request.always_drafts,
        follows=not sequence.out_of_sync,
        budget=sequence.budget,
        buffered=sequence.buffered,
    )


class Proposer:
    def __init__(
        self, max_drafts: int | None = None, *, lookup: bool = False, candidates: int = ALL
    ) -> None:
        self.candidates = candidates  # of a draft
        self._max_drafts = max_drafts  # per sequence
        self._lookup = lookup
        self._texts: WeakKeyDictionary[SequenceState, NgramIndex] = WeakKeyDictionary()

    def views(self, sequences: Sequence[SequenceState]) -> list[SequenceView]:
        """Return what decisions depend on, with what may be verified next of each sequence."""
        return [view(sequence, self._proposals(sequence)) for sequence in sequences]

    def _proposals(self, sequence: SequenceState) -> list[Proposal]:
        sampled = sequence.sampled
        count = sequence.budget - 1
        if self._max_drafts is not None:
            count = min(self._max_drafts, count)
        proposals = list[Proposal]()
        if count <= 0:
            return proposals
        if sequence.candidates is not None:
            proposals.append(_propose_drafts(sequence, sequence.candidates, count, sampled))
        if not sequence.request.drafting:
            return proposals
        if sequence.matcher is not None:
            tokens = sequence.matcher.forced_tokens(())[:count]
            if tokens:
                proposals.append(_forced(tokens, sampled))
        if self._lookup:
            proposals += self._look_up(sequence, count, sampled)
        return proposals

    def _look_up(self, sequence: SequenceState, count: int, sampled: bool) -> list[Proposal]:
        prompt = sequence.request.prompt
        text = self._texts.get(sequence)
        if text is None:
            text = NgramIndex(prompt)
            self._texts[sequence] = text
        text.extend(sequence.tokens[len(text) - len(prompt) :])
        match, tokens = text.find(count)
        if match and sequence.matcher is not None:
            tokens = tokens[: sequence.matcher.count_allowed((), tokens)]
        if not match or not tokens:
            return []
        return [Proposal("lookup", tokens, (), sampled, match)]


def _propose_drafts(
    sequence: SequenceState, candidates: Candidates, count: int, sampled: bool
) -> Proposal:
    ids = candidates.ids[:count]
    depth, best = ids.shape
    probs = candidates.probs[:count].reshape(depth, -1, best)  # a row per candidate before, or one
    if sampled:
        probs = _with_noise(ids, probs, sequence.request.sampling, sequence.position + 1)
    if sequence.matcher is not None:
        return allowed_chain(sequence.matcher, ids, probs, count, sampled)
    return Proposal("drafter", *best_chain(ids, probs), sampled)


def _forced(tokens: list[int], sampled: bool) -> Proposal:
    n = len(tokens)
    return Proposal("grammar", tokens, [1.0] * n, sampled, forced=[True] * n)


def _with_noise(
    ids: Int64, probs: Float32, sampling: SamplingParams, first_position: int
) -> Float32:
    """Return the drafter's probabilities `[D, 1 or k, k]` given the target's sampling noise."""
    logits = np.log(np.maximum(probs, 1e-9)) / sampling.temperature
    weights = truncate(np.exp(logits - logits.max(-1, keepdims=True)), sampling)
    positions = range(first_position, first_position + len(ids))
    scores = np.log(np.maximum(weights, 1e-30)) + noise(sampling.seed, positions, ids)[:, None]
    noisy: Float32 = np.exp(SHARPNESS * (scores - scores.max(-1, keepdims=True)))
    noisy /= noisy.sum(-1, keepdims=True)
    return noisy
