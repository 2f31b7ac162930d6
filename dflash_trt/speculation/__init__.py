"""Speculation: what may be verified next, its cost and gain, and the choice of each round."""

from dflash_trt.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.speculation.profile import CostProfile
from dflash_trt.speculation.proposal import (
    SOURCES,
    VERIFIED,
    Proposal,
    RoundPlan,
    SequenceProposals,
)
