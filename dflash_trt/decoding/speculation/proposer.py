"""Proposer: drafts from the drafter's candidates, from n-gram lookup and from a grammar."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.config import Speculation
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.decoding.logits_processor import truncate
from dflash_trt.decoding.messages import Float32, Int64
from dflash_trt.decoding.sampling import SamplingParams, noise
from dflash_trt.decoding.speculation.costs import StepCosts
from dflash_trt.decoding.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.decoding.speculation.proposal import Proposal, Row
from dflash_trt.engines import EngineInfo

if TYPE_CHECKING:
    from dflash_trt.decoding.sequence import SequenceState

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


ALL = 64  # candidates per draft: all that the drafter's graph returns
CANDIDATES = 8  # per draft, with the adaptive policy
SHARPNESS = 0.6  # trust in the best noisy candidate; fitted by replaying the demo pair


class Proposer:
    def __init__(
        self, max_drafts: int | None = None, *, lookup: bool = False, candidates: int = ALL
    ) -> None:
        self.candidates = candidates  # of a draft
        self._max_drafts, self._lookup = max_drafts, lookup  # max_drafts: per row
        self._texts: WeakKeyDictionary[SequenceState, NgramIndex] = WeakKeyDictionary()

    def rows(self, sequences: "Sequence[SequenceState]") -> list[Row]:
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

    def _propose_drafts(self, sequence: "SequenceState", count: int, sampled: bool) -> Proposal:
        assert sequence.candidates is not None
        ids, probs = sequence.candidates
        ids, probs = ids[:count], probs[:count]
        probs = probs.reshape(len(ids), -1, ids.shape[1])  # one row, or one per candidate before
        if sampled:
            probs = _with_noise(ids, probs, sequence.request.sampling, sequence.position + 1)
        if sequence.matcher is not None:
            return allowed_chain(sequence.matcher, ids, probs, count, sampled)
        return Proposal("drafter", *best_chain(ids, probs), sampled)

    def _look_up(self, sequence: "SequenceState", count: int, sampled: bool) -> list[Proposal]:
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
