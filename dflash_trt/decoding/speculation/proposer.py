"""Proposer: drafts from the drafter's candidates, from n-gram lookup and from a grammar."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.config import Speculation
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.decoding.logits_processor import truncate
from dflash_trt.decoding.messages import Float32, Int64
from dflash_trt.decoding.sampling import SamplingParams, noise
from dflash_trt.decoding.speculation.costs import StepCosts
from dflash_trt.decoding.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.decoding.speculation.proposal import Proposal, Row, best_chain, best_tree
from dflash_trt.engines import EngineInfo

MAX_MATCH = 16  # longest match that is measured


class NgramIndex:
    """Index of where each 1-, 2- and 3-gram of a text was last followed by a token.

    Three is the longest, as in transformers' prompt_lookup: five gained nothing in a replay of the
    demo pair's texts (3.36 tokens a round with either).
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        # keys are integers: that many tuples would burden the garbage collector
        self._after: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        self._end = (-1, -1, -1)  # the last n-grams of one, two and three tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; about 0.5 us each."""
        text, (after_one, after_two, after_three) = self._text, self._after
        one, two, three = self._end
        for place, token in enumerate(tokens, len(text)):
            after_one[one] = after_two[two] = after_three[three] = place
            one, two, three = token, one << 32 | token, two << 32 | token
            text.append(token)
        self._end = one, two, three

    def find(self, count: int) -> tuple[int, list[int]]:
        """Return the length of a match with the text's end and the `count` tokens after it.

        Takes the latest match of the longest n-gram, three tokens at most, then measures its length
        up to `MAX_MATCH`. A match that runs into the end of the text continues with its own copy,
        as a loop does. Returns (0, []) if the last token is new.
        """
        text = self._text
        places = [after.get(run) for after, run in zip(self._after, self._end, strict=True)]
        length = next((n for n in (3, 2, 1) if places[n - 1] is not None), 0)
        start = places[length - 1]
        if not length or start is None:
            return 0, []
        limit = min(start, MAX_MATCH)
        while length < limit and text[start - 1 - length] == text[-1 - length]:
            length += 1
        found = text[start : start + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return length, found


LOOKED_AT = 16  # candidates per position, best first


class _Draft(NamedTuple):
    token: int
    value: float  # the probability that it and all before it are accepted
    line: int  # the row of probabilities for candidates after it
    forced: tuple[int, ...] | None  # tokens the grammar forces after it; None: it was a candidate


def forced_drafts(matcher: Matcher, size: int, sampled: bool) -> list[Proposal]:
    """Return a chain of the tokens that the grammar forces after the text, if any."""
    tokens = matcher.forced(())[:size]
    n = len(tokens)
    forced = Proposal("grammar", tokens, range(n), [1.0] * n, sampled, forced=[True] * n)
    return [forced] if n else []


def best_drafts(
    matcher: Matcher, ids: Int64, probs: Float32, size: int, max_depth: int, sampled: bool
) -> Proposal:
    """Return `best_tree`, or `best_chain` if max_depth is 0, as the grammar allows."""
    lines, orders, candidates = probs.tolist(), (-probs).argsort(-1).tolist(), ids.tolist()

    def after(path: list[int], draft: _Draft) -> Iterator[_Draft]:
        depth = len(path)
        there = candidates[depth] if depth < len(candidates) else []
        if forced := draft.forced or matcher.forced(path):
            line = there.index(forced[0]) if forced[0] in there else 0
            yield _Draft(forced[0], draft.value, line, tuple(forced[1:]))
        elif there:
            line = min(draft.line, len(lines[depth]) - 1)
            order, chances = orders[depth][line][:LOOKED_AT], lines[depth][line]
            found = [i for i in order if matcher.allowed(path, [there[i]])]
            mass = sum(chances[i] for i in found) or 1.0  # renormalized, as the target's choice is
            yield from (_Draft(there[i], draft.value * chances[i] / mass, i, None) for i in found)

    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    forced: list[bool] = []
    paths: list[list[int]] = [[]]
    heap: list[tuple[float, int, int, _Draft, Iterator[_Draft]]] = []
    turns = count()

    def offer(parent: int, drafts: Iterator[_Draft]) -> None:
        best = next(drafts, None)
        if best is not None and best.value > 0:
            heappush(heap, (-best.value, next(turns), parent, best, drafts))

    offer(0, after([], _Draft(0, 1.0, 0, None)))
    while heap and len(tokens) < size:
        _, _, parent, draft, others = heappop(heap)
        paths.append([*paths[parent], draft.token])
        tokens.append(draft.token)
        parents.append(parent)
        values.append(draft.value)
        forced.append(draft.forced is not None)
        if max_depth:
            offer(parent, others)
        if not max_depth or len(paths[-1]) < max_depth:
            offer(len(tokens), after(paths[-1], draft))
    return Proposal("drafter", tokens, parents, values, sampled, forced=forced)


if TYPE_CHECKING:
    from dflash_trt.decoding.sequence import SequenceState

ALL = 64  # candidates per draft: all that the drafter's graph returns
CANDIDATES = 8  # per draft, for trees and sampled chains
HOST_SECONDS = 1e-4  # seconds of Python that these cost per row
HOST_SHARE = 0.05  # limit of that cost, as a fraction of a plain step
SHARPNESS = 0.6  # trust in the best noisy candidate; fitted by replaying the demo pair


class Proposer:
    """Makes the proposals that a policy chooses from."""

    def __init__(
        self,
        max_drafts: int | None = None,
        *,
        max_depth: int = 0,
        lookup: bool = False,
        candidates: int = ALL,
    ) -> None:
        """Set limits: drafts per row, depth of trees (0: chains), candidates of a draft."""
        self.candidates = candidates
        self._max_drafts, self._max_depth, self._lookup = max_drafts, max_depth, lookup
        self._texts: WeakKeyDictionary[SequenceState, NgramIndex] = WeakKeyDictionary()

    def rows(self, sequences: "Sequence[SequenceState]") -> list[Row]:
        """Return all proposals of each sequence for this round."""
        rows = []
        for sequence in sequences:
            count = sequence.budget - 1
            if self._max_drafts is not None:
                count = min(self._max_drafts, count)
            proposals = []
            if count > 0 and sequence.candidates is not None:
                proposals.append(self._drafted(sequence, count))
            # a broken drafter's tree is empty
            first = [x.tokens[0] for x in proposals if x.tokens]
            if count > 0 and sequence.matcher is not None and sequence.request.drafting:
                proposals += forced_drafts(sequence.matcher, count, _is_sampled(sequence))
            if count > 0 and self._lookup and sequence.request.drafting:
                proposals += self._looked_up(sequence, count, first)
            out_of_sync = sequence.out_of_sync and sequence.request.drafting
            rows.append(Row(proposals, _is_sampled(sequence), out_of_sync))
        return rows

    def _drafted(self, sequence: "SequenceState", count: int) -> Proposal:
        assert sequence.candidates is not None
        ids, probs = sequence.candidates
        ids, probs = ids[:count], probs[:count]
        probs = probs.reshape(len(ids), -1, ids.shape[1])  # one row, or one per candidate before
        sampled = _is_sampled(sequence)
        if sampled:
            probs = _with_noise(ids, probs, sequence.request.sampling, sequence.position + 1)
        if sequence.matcher is not None:
            return best_drafts(sequence.matcher, ids, probs, count, self._max_depth, sampled)
        if self._max_depth:
            tree = best_tree(ids[: self._max_depth], probs[: self._max_depth], count)
        else:
            tree = best_chain(ids, probs)
        return Proposal("drafter", tree.tokens, tree.parents, tree.values, sampled)

    def _looked_up(
        self, sequence: "SequenceState", count: int, first: Sequence[int]
    ) -> list[Proposal]:
        """Return the n-gram proposal, if any; first: the drafter's first token, if any."""
        prompt = sequence.request.prompt
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = NgramIndex(prompt)
        text.extend(sequence.tokens[len(text) - len(prompt) :])
        match, tokens = text.find(count)
        if match and sequence.matcher is not None:
            tokens = tokens[: sequence.matcher.allowed((), tokens)]
        if not (match and tokens):
            return []
        contradicted = bool(first) and tokens[0] not in first
        places, sampled = range(len(tokens)), _is_sampled(sequence)
        return [Proposal("lookup", tokens, places, (), sampled, match, contradicted)]


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
    refined = HOST_SHARE * costs.verify(1, 1, 0) > HOST_SECONDS
    # a tree's tokens are at other cache positions than a chain's, so attention sums in another
    # order; quantized layers amplify that, see `engines/onnxruntime.py`
    trees = speculation.tree and refined and not target.quantized
    proposer = Proposer(
        max_drafts,
        max_depth=target.deepest if trees else 0,
        lookup=speculation.lookup,
        candidates=CANDIDATES if refined else 1,
    )
    return Adaptive(costs, draft_tokens, max_drafts), proposer


def _is_sampled(sequence: "SequenceState") -> bool:
    return bool(sequence.request.sampling.temperature)


def _with_noise(ids: Int64, probs: Float32, sampling: SamplingParams, place: int) -> Float32:
    """Return the drafter's probabilities `[D, 1 or k, k]` given the target's sampling noise.

    place: position of the first draft in the text.
    """
    logits = np.log(np.maximum(probs, 1e-9)) / sampling.temperature
    weights = truncate(np.exp(logits - logits.max(-1, keepdims=True)), sampling)
    numbers = noise(sampling.seed, range(place, place + len(ids)), ids)[:, None]
    scores = np.log(np.maximum(weights, 1e-30)) + numbers
    noisy: Float32 = np.exp(SHARPNESS * (scores - scores.max(-1, keepdims=True)))
    noisy /= noisy.sum(-1, keepdims=True)
    return noisy
