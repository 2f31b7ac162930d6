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
    drafter_precision: str | None,
    max_accuracy_loss: float,
    scratch: Path,
    report: Report,
) -> Precisions:
    """The fastest whose greedy tokens differ in no larger share; `scratch` is gone afterwards.

    drafter_precision: None: the target's.
    """
    try:
        measured = list(_measure(target, drafter, drafter_precision, scratch, report))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    kept = [each for each in measured if 1 - each.agreement <= max_accuracy_loss]
    return Precisions(max(kept, key=lambda each: each.tokens_per_s).precision, measured)


def _measure(
    target: Target,
    drafter: Drafter | None,
    drafter_precision: str | None,
    scratch: Path,
    report: Report,
) -> Iterator[Candidate]:
    """The unquantized target, then each precision against it."""
    # imported here: it loads the runtime
    from dflash_trt.engines.accuracy import compare, original_logits  # noqa: PLC0415

    length = longest_sequence(target, drafter)
    tokens = min(TOKENS, length // 2)
    prompts = chat_prompts(target.directory, length - tokens)
    for precision in ("none", *BITS):
        bits = BITS.get(precision), BITS.get(drafter_precision or precision)
        write_engines(target, drafter, scratch, length, report, *bits)
        run = decode(scratch, prompts, tokens, report)
        if precision == "none":
            texts = [[*ids, *text] for ids, text in zip(prompts, run.outputs, strict=True)]
            expected, agreement = original_logits(scratch / "target", texts), 1.0
        else:
            agreement = compare(scratch / "target", expected, texts).agreement
        shutil.rmtree(scratch)
        speed = max(run.dflash_tokens_per_s, run.plain_tokens_per_s)
        yield Candidate(precision, speed, run.tau, agreement)
