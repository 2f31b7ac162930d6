"""Rounds on engines of this process."""

from collections.abc import Callable

from dflash_trt.decoding.messages import (
    FREED,
    DraftInput,
    DraftOutput,
    RoundOutput,
    RunRound,
    VerifyInput,
    VerifyOutput,
    no_drafts,
)
from dflash_trt.decoding.rounds import draft, verify
from dflash_trt.decoding.speculation import FeatureBuffer
from dflash_trt.engines import KEPT, Engine

Propose = Callable[[VerifyInput, VerifyOutput], DraftOutput]
"""What drafts after the verified tokens. See `DraftOutput`."""


def in_process(target: Engine, drafter: Engine | None) -> RunRound:
    """Without a drafter the target decodes alone."""
    held = None if drafter is None else FeatureBuffer()

    def propose(x: VerifyInput, checked: VerifyOutput) -> DraftOutput:
        if drafter is None or not needs_drafter(x):
            return no_drafts(len(x.rows))
        return draft(drafter, DraftInput(x.batch, x.rows, checked.results, checked.features))

    return rounds_with(target, propose, held)


def needs_drafter(x: VerifyInput) -> bool:
    """Whether drafts are wanted, or slots or blocks copied, the drafter's with the target's."""
    copied = (x.batch[4::4] != FREED) | (x.batch[3::4] >= KEPT)
    return bool(x.batch[1] > 0 or copied.any())


def rounds_with(target: Engine, propose: Propose, held: FeatureBuffer | None = None) -> RunRound:
    """Rounds on a target of this process and whatever drafts for it; held: see `verify`."""

    def run(x: VerifyInput) -> RoundOutput:
        checked = verify(target, x, held)
        drafted = propose(x, checked)
        return RoundOutput(
            checked.results,
            checked.logprobs,
            checked.logprob_ids,
            checked.verify_seconds,
            *drafted,
        )

    return run
