"""What may be verified next: what the drafter says of a sequence, and what its text repeats."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
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

MAX_MATCH = 16  # tokens of a match that are looked at: a long one promises much


class NgramIndex:
    """A text, and where each run of one, two and three of its tokens was last followed by another.

    As in transformers' prompt_lookup, three is the longest: five found nothing better (a replay of
    the demo pair's texts, 3.36 tokens a round by either).
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        # by run, which is one number: so many tuples would be work for the garbage collector
        self._after: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        self._end = (-1, -1, -1)  # the runs of the last one, two and three tokens
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
        """The length of a match and the `count` tokens that followed it.

        Of the earlier copies of the text's end, those of its last three tokens count if there are
        any, otherwise of two, otherwise of one; of these the latest. How far it is alike is
        measured up to `MAX_MATCH`. What runs into the end of the text goes on with its own copy, as
        a loop does. (0, []) if even the last token is new.
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


LOOKED_AT = 16  # candidates of a place, best first


class _Draft(NamedTuple):
    token: int
    value: float  # that the target takes it and all before it
    line: int  # of the probabilities of the candidates after it
    forced: tuple[int, ...] | None  # what the grammar forces after it; None: it was a candidate


def forced_drafts(matcher: Matcher, size: int, sampled: bool) -> list[Proposal]:
    """What the grammar forces after the text, if anything: drafts that no drafter is needed for."""
    tokens = matcher.forced(())[:size]
    n = len(tokens)
    forced = Proposal("grammar", tokens, range(n), [1.0] * n, sampled, forced=[True] * n)
    return [forced] if n else []


def best_drafts(
    matcher: Matcher, ids: Int64, probs: Float32, size: int, max_depth: int, sampled: bool
) -> Proposal:
    """As `tree.best_tree` and, with a max_depth of 0, `tree.best_chain`: but for what the grammar
    forbids, and where it forces tokens, with them in place of candidates."""
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
            mass = sum(chances[i] for i in found) or 1.0  # all that the target's choice is of, too
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
    from dflash_trt.decoding.sequence import Sequence

ALL = 64  # candidates of each draft: all that the drafter's graph picks out
CANDIDATES = 8  # of each draft, for trees and sampled chains
HOST_SECONDS = 1e-4  # what these cost a row in Python
HOST_SHARE = 0.05  # of a plain step, that they may cost
SHARPNESS = 0.6  # how far the best noisy candidate is trusted: found by replaying the demo pair


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
        """max_drafts: of a row in a round; max_depth: of trees, 0 for chains; candidates: of each
        draft, that the drafter is asked for."""
        self.candidates = candidates
        self._max_drafts, self._max_depth, self._lookup = max_drafts, max_depth, lookup
        self._texts: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def rows(self, sequences: "Seq[Sequence]") -> list[Row]:
        """Of each sequence all that may be verified in this round."""
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

    def _drafted(self, sequence: "Sequence", count: int) -> Proposal:
        assert sequence.candidates is not None
        ids, probs = sequence.candidates
        ids, probs = ids[:count], probs[:count]
        probs = probs.reshape(len(ids), -1, ids.shape[1])  # one line, or one by candidate before
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

    def _looked_up(self, sequence: "Sequence", count: int, first: Seq[int]) -> list[Proposal]:
        """first: the drafter's first token, if there is one."""
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
    """What a `Scheduler` needs to decode as the config says; costs: for the policy adaptive."""
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
    # a tree's tokens lie elsewhere in the cache than a chain's, so that attention adds up in
    # another order: quantized layers make much of that, see `engines/onnxruntime.py`
    trees = speculation.tree and refined and not target.quantized
    proposer = Proposer(
        max_drafts,
        max_depth=target.deepest if trees else 0,
        lookup=speculation.lookup,
        candidates=CANDIDATES if refined else 1,
    )
    return Adaptive(costs, draft_tokens, max_drafts), proposer


def _is_sampled(sequence: "Sequence") -> bool:
    return bool(sequence.request.sampling.temperature)


def _with_noise(ids: Int64, probs: Float32, sampling: SamplingParams, place: int) -> Float32:
    """The drafter's probabilities `[D, 1 or k, k]`, knowing how the target will sample.

    place: of the first draft in the text.
    """
    logits = np.log(np.maximum(probs, 1e-9)) / sampling.temperature
    weights = truncate(np.exp(logits - logits.max(-1, keepdims=True)), sampling)
    numbers = noise(sampling.seed, range(place, place + len(ids)), ids)[:, None]
    scores = np.log(np.maximum(weights, 1e-30)) + numbers
    noisy: Float32 = np.exp(SHARPNESS * (scores - scores.max(-1, keepdims=True)))
    noisy /= noisy.sum(-1, keepdims=True)
    return noisy
