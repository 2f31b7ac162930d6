"""The policy and the proposer that a config asks for."""

from dflash_trt.config import Speculation
from dflash_trt.decoding.proposer import Proposer
from dflash_trt.engines import EngineInfo
from dflash_trt.speculation.costs import StepCosts
from dflash_trt.speculation.policy import Adaptive, Fixed, Policy

CANDIDATES = 8  # per draft, with the adaptive policy


def strategy(
    speculation: Speculation, target: EngineInfo, costs: StepCosts | None
) -> tuple[Policy, Proposer]:
    """Return the policy and proposer of a config; costs: for the adaptive policy."""
    if speculation.method == "none":
        return Fixed(0), Proposer()
    max_drafts = target.most_verified - 1
    if speculation.policy == "fixed":
        costs = None
    if speculation.method == "ngram":
        draft_tokens = min(speculation.draft_tokens or max_drafts, max_drafts)
        proposer = Proposer(draft_tokens, lookup=True, candidates=1)
        if costs is None:
            return Fixed(draft_tokens), proposer
        return Adaptive(costs, 0, max_drafts), proposer
    draft_tokens = min(speculation.draft_tokens or target.block_size, target.block_size - 1)
    if costs is None:
        return Fixed(draft_tokens), Proposer()
    proposer = Proposer(max_drafts, lookup=speculation.lookup, candidates=CANDIDATES)
    return Adaptive(costs, draft_tokens, max_drafts), proposer
