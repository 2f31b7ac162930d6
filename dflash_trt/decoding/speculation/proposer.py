"""What may be verified next: what the drafter says of a sequence, and what its text repeats."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.config import Speculation
from dflash_trt.decoding.gumbel import noise
from dflash_trt.decoding.logits_processor import truncate
from dflash_trt.decoding.messages import Float32, Int64
from dflash_trt.decoding.sampling_params import SamplingParams
from dflash_trt.decoding.speculation.constrained import best_drafts, forced_drafts
from dflash_trt.decoding.speculation.cost_model import StepCosts
from dflash_trt.decoding.speculation.ngram import NgramIndex
from dflash_trt.decoding.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.decoding.speculation.proposal import Proposal, Row
from dflash_trt.decoding.speculation.tree import best_chain, best_tree
from dflash_trt.engines import EngineInfo

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
