"""`engine.quantize: auto`: in which precision a target decodes fastest here, and well enough."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt.build.acceptance_probe import (
    TOKENS,
    chat_prompts,
    decode,
    longest_sequence,
    write_engines,
)
from dflash_trt.checkpoints import Drafter, Report, Target

BITS: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}


@dataclass(frozen=True)
class Candidate:
    """A precision as it was measured on this machine, one sequence at a time.

    tokens_per_s: greedy, with whole blocks of drafts or alone, whichever is faster; agreement: in
    which share of places of the unquantized target's texts the greedy token is the same.
    """

    precision: str  # "none": the checkpoint's
    tokens_per_s: float
    tau: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"{self.precision}: {self.tokens_per_s:.1f} tokens/s, greedy token equal at "
            f"{self.agreement:.1%}, tau {self.tau:.2f}"
        )


@dataclass(frozen=True)
class Precisions:
    chosen: str
    measured: list[Candidate]

    @property
    def bits(self) -> Literal[4, 8] | None:
        return BITS.get(self.chosen)


def choose_precision(
    target: Target,
    drafter: Drafter | None,
    max_accuracy_loss: float,
    scratch: Path,
    report: Report,
) -> Precisions:
    """The fastest whose greedy tokens differ in no larger share; `scratch` is gone afterwards.

    The drafter is measured in the target's precision.
    """
    try:
        measured = list(_measure(target, drafter, scratch, report))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    kept = [each for each in measured if 1 - each.agreement <= max_accuracy_loss]
    return Precisions(max(kept, key=lambda each: each.tokens_per_s).precision, measured)


def _measure(
    target: Target, drafter: Drafter | None, scratch: Path, report: Report
) -> Iterator[Candidate]:
    """The unquantized target, then each precision against it."""
    from dflash_trt.engines.accuracy import compare  # noqa: PLC0415  (it loads the runtime)

    length, texts = longest_sequence(target, drafter), []
    tokens = min(TOKENS, length // 2)
    prompts = chat_prompts(target.directory, length - tokens)
    original = scratch / "none"
    for precision in ("none", *BITS):
        engines, agreement = scratch / precision, 1.0
        write_engines(target, drafter, engines, length, report, BITS.get(precision))
        run = decode(engines, prompts, tokens, report)
        if engines == original:
            texts = [[*ids, *text] for ids, text in zip(prompts, run.outputs, strict=True)]
        else:
            agreement = compare(engines / "target", original / "target", texts).agreement
            shutil.rmtree(engines)
        speed = max(run.dflash_tokens_per_s, run.plain_tokens_per_s)
        yield Candidate(precision, speed, run.tau, agreement)
