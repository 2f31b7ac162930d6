"""Speculation: what may be verified next, its cost and gain, and the decision of each step."""

from dflash_trt.speculation.decision import Choice, Decision, Features, NextStep, SequenceView
from dflash_trt.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.speculation.profile import CostProfile
from dflash_trt.speculation.proposal import SOURCES, VERIFIED, Proposal
