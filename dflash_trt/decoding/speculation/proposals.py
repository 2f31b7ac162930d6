"""What may be verified next: what the drafter says of a sequence, and what its text repeats."""

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

import numpy as np

from dflash_trt.config.build import Speculation
from dflash_trt.decoding.gumbel import noise
from dflash_trt.decoding.logits_processor import truncate
from dflash_trt.decoding.messages import Float32, Int64
from dflash_trt.decoding.sampling_params import SamplingParams
from dflash_trt.decoding.sequence import Sequence
from dflash_trt.decoding.speculation.correction import Pairs
from dflash_trt.decoding.speculation.lookup import Suffixes
from dflash_trt.decoding.speculation.offers import Proposal, Row
from dflash_trt.decoding.speculation.path import best_chain
from dflash_trt.decoding.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.decoding.speculation.timings import StepCosts
from dflash_trt.decoding.speculation.tree import best_first, best_first_given
from dflash_trt.engines.info import EngineInfo

CANDIDATES = 8  # of each draft, for trees, correction and draws
HOST_SECONDS = 1e-4  # what these two cost a row in Python
HOST_SHARE = 0.05  # of a plain step, that they may cost
SHARP = 0.6  # how far the best noisy candidate is to be trusted: found by replaying the demo pair


class Chains:
    """Proposes all that the drafter drafts, as one chain: what a fixed policy verifies."""

    candidates = 64  # of each draft: all that the drafter's graph picks out
    learns = False

    def rows(self, sequences: Seq[Sequence], context: int) -> list[Row]:
        """See `Proposer`."""
        rows = []
        for sequence in sequences:
            sampling, offers = sequence.request.sampling, list[Proposal]()
            if sequence.candidates is not None:
                ids, probs = sequence.candidates
                probs = probs.reshape(len(ids), -1, ids.shape[1])
                if sampling.temperature:
                    probs = _with_noise(ids, probs, sampling, sequence.position + 1)
                offers.append(_chain(ids, probs, sampling.temperature > 0))
            rows.append(Row(offers, sampling.temperature > 0))
        return rows

    def observe(self, sequence: Sequence, accepted: int) -> None:
        """See `Proposer`."""


class Proposer:
    """Makes the offers that an adaptive policy chooses from."""

    def __init__(self, sources: Speculation, costs: StepCosts, target: EngineInfo) -> None:
        self._sources, self._costs = sources, costs
        # a tree's tokens lie elsewhere in the cache than a chain's, so that attention adds up in
        # another order: quantised layers make much of that, see `EngineInfo.least_rows`
        self._tree = sources.tree and not target.quantized
        self._most, self._deepest = target.most_verified - 1, target.deepest
        self._pairs = Pairs()
        # of each draft, to be had from the drafter: drawn chains, too, are better for a choice
        refined = HOST_SHARE * costs.verify(1, 1, 0) > HOST_SECONDS
        self.candidates = CANDIDATES if refined else 1
        self.learns = sources.correction and refined

    def rows(self, sequences: Seq[Sequence], context: int) -> list[Row]:
        """Of each sequence all that may be verified in this round."""
        n = len(sequences)
        refine = self.candidates > 1 and (
            n * HOST_SECONDS < HOST_SHARE * self._costs.verify(n, 1, context)
        )
        rows = []
        for sequence in sequences:
            most = min(self._most, sequence.budget - 1)
            offers = []
            if sequence.candidates is not None and most:
                offers.append(self._drafted(sequence, refine, most))
            if self._sources.lookup and most and sequence.request.drafting:
                # a broken drafter's tree is empty
                said = [x.tokens[0] for x in offers if x.tokens]
                offers += _looked_up(sequence, most, said)
            drawn = bool(sequence.request.sampling.temperature)
            rows.append(Row(offers, drawn, sequence.out_of_sync and sequence.request.drafting))
        return rows

    def observe(self, sequence: Sequence, accepted: int) -> None:
        """Learn from what was just committed, accepted drafts and a token, if it `learns`."""
        self._pairs.observe(sequence.tokens[-accepted - 2 :])

    def _drafted(self, sequence: Sequence, refine: bool, most: int) -> Proposal:
        assert sequence.candidates is not None
        ids, probs = sequence.candidates
        ids, probs = ids[:most], probs[:most]
        drawn = bool(sequence.request.sampling.temperature)
        if self.candidates == 1:
            values = [*accumulate(probs[:, 0].tolist(), mul)]
            return Proposal("drafter", ids[:, 0].tolist(), range(len(ids)), values, drawn)
        k = ids.shape[1]
        given = probs.shape[1] > k
        if refine and self._sources.correction and not given and self._pairs.ready:
            probs, given = self._pairs.reweigh(ids[None], probs[None])[0], True
        probs = probs.reshape(len(ids), -1, k)  # one line, or one for each candidate before
        if drawn:
            probs = _with_noise(ids, probs, sequence.request.sampling, sequence.position + 1)
        if not (refine and self._tree):
            return _chain(ids, probs, drawn)
        ids, probs = ids[: self._deepest], probs[: self._deepest]
        if given:
            tree = best_first_given(ids.tolist(), probs.tolist(), most)
        else:
            probs = probs[:, 0]
            if drawn:  # noise has changed their order
                order = (-probs).argsort(-1)
                ids, probs = (np.take_along_axis(x, order, 1) for x in (ids, probs))
            tree = best_first(ids.tolist(), probs.tolist(), most)
        return Proposal("drafter", tree.tokens, tree.parents, tree.values, drawn)


def strategy(
    speculation: Speculation, target: EngineInfo, costs: StepCosts | None
) -> tuple[Policy, Proposer | None]:
    """What a `Scheduler` needs to decode as the config says; costs: for the policy adaptive."""
    draft_tokens = min(speculation.draft_tokens or target.block_size, target.block_size - 1)
    if speculation.policy == "fixed" or costs is None:
        return Fixed(draft_tokens), None
    policy = Adaptive(costs, draft_tokens, target.most_verified - 1)
    return policy, Proposer(speculation, costs, target)


def _chain(ids: Int64, probs: Float32, drawn: bool) -> Proposal:
    """The best one; probs `[D, 1 or k, k]`."""
    tokens, chances = best_chain(ids, probs)
    return Proposal("drafter", tokens, range(len(tokens)), [*accumulate(chances, mul)], drawn)


def _with_noise(ids: Int64, probs: Float32, sampling: SamplingParams, place: int) -> Float32:
    """The drafter's probabilities `[D, 1 or k, k]`, knowing how the target will sample.

    place: of the first draft in the text.
    """
    logits = np.log(np.maximum(probs, 1e-9)) / sampling.temperature
    weights = truncate(np.exp(logits - logits.max(-1, keepdims=True)), sampling)
    numbers = noise(sampling.seed, range(place, place + len(ids)), ids)[:, None]
    scores = np.log(np.maximum(weights, 1e-30)) + numbers
    noisy: Float32 = np.exp(SHARP * (scores - scores.max(-1, keepdims=True)))
    noisy /= noisy.sum(-1, keepdims=True)
    return noisy


def _looked_up(sequence: Sequence, most: int, said: Seq[int]) -> list[Proposal]:
    """said: the drafter's first token, if there is one."""
    prompt, text = sequence.request.prompt, sequence.suffixes
    if text is None:
        text = sequence.suffixes = Suffixes(prompt)
    text.extend(sequence.tokens[len(text) - len(prompt) :])
    match, tokens = text.find(most)
    if not match:
        return []
    drawn = bool(sequence.request.sampling.temperature)
    doubted = bool(said) and tokens[0] not in said
    return [Proposal("lookup", tokens, range(len(tokens)), (), drawn, match, doubted)]
