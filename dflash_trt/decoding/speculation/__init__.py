"""Speculation: what may be verified next, its cost and gain, and the choice of each round."""

from dflash_trt.decoding.speculation.costs import CostProfile, measure
from dflash_trt.decoding.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.decoding.speculation.proposal import SOURCES, VERIFIED, Proposal, Row, StepPlan
from dflash_trt.decoding.speculation.proposer import Proposer, strategy
