"""Figures of a setting from its passes, and what changed between two runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from dflash_trt.bench.results import Cell, Level, MatrixRun, Run, ServerRun
from dflash_trt.decoding.speculation import VERIFIED
from dflash_trt.errors import BenchError

RESAMPLES = 2000
CONFIDENCE = 0.99
Figure = Literal[
    "speedup", "tau", "identical texts", "tokens/s", "of a user", "first token, s", "good answers/s"
]
Verdict = Literal["worse", "better", "same", "once"]  # once: measured so, the noise is unknown


class Spread(NamedTuple):
    """Median, smallest and largest of some passes."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure of one setting, in both runs."""

    setting: str
    figure: Figure
    before: float
    after: float
    relative: Spread  # the change as a share; low and high are its interval
    verdict: Verdict


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def rates(cell: Cell) -> list[float]:
    """Tokens per second of each pass, prompts included."""
    return [sample.tokens / sample.seconds for sample in cell.samples]


def full_rates(cell: Cell) -> list[float]:
    """Tokens per second that these streams would have in the long run.

    A token costs its share of the prompts, and of rounds in which all streams took part. Others
    are left out: while prompts come in and texts end batches are smaller, and the sooner a text
    ends, the more so. Where texts end before the last prompt is in, it is `rates`.
    """
    return [
        1 / (sample.prefill / sample.tokens + sample.full_seconds / sample.full_tokens)
        if sample.full_tokens
        else rate
        for sample, rate in zip(cell.samples, rates(cell), strict=True)
    ]


def plain_of(run: Run, cell: Cell) -> Cell | None:
    """Plain decoding that ran in turns with `cell`."""
    found = (each for each in run.cells if each.method == "plain" and each.group == cell.group)
    return next(found, None)


def speedups(cell: Cell, plain: Cell) -> list[float]:
    """Each pass over the plain pass that ran beside it: the machine's noise meets both."""
    return [own / its for own, its in zip(rates(cell), rates(plain), strict=False)]


def phases(cell: Cell) -> dict[str, float]:
    """Median milliseconds of a round (a step of the whole batch) by what they went to."""
    names = ("verify", "draft", "sampling", "scheduler")
    return {
        name: median(1e3 * getattr(sample, name) / max(sample.steps, 1) for sample in cell.samples)
        for name in names
    }


def verified(cell: Cell) -> dict[str, float]:
    """Shares of the rounds of single sequences, by what was verified (`VERIFIED`)."""
    counts = [sum(sample.choices.get(name, 0) for sample in cell.samples) for name in VERIFIED]
    total = max(sum(counts), 1)
    return {name: count / total for name, count in zip(VERIFIED, counts, strict=True)}


def change(before: Sequence[float], after: Sequence[float]) -> Spread:
    """Relative change of the median, and its bootstrap interval (`CONFIDENCE`)."""
    random = np.random.default_rng(0)
    medians = []
    for values in (before, after):
        picked = random.integers(len(values), size=(RESAMPLES, len(values)))
        medians.append(np.median(np.array(values)[picked], axis=1))
    ratios = medians[1] / medians[0] - 1
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Spread(median(after) / median(before) - 1, float(low), float(high))


def compare_servers(before: ServerRun | MatrixRun, after: ServerRun | MatrixRun) -> list[Change]:
    """What each load that both ran got of either server, or of two matrices' cells.

    Each was measured once, so that nothing is said to be worse. BenchError for no load in common.
    """
    old = _levels(before)
    found = [
        Change(
            setting=setting, figure=figure, before=was, after=now, relative=share, verdict="once"
        )
        for setting, level in _levels(after).items()
        if setting in old
        for (figure, was), (_, now) in zip(_told(old[setting]), _told(level), strict=True)
        if was and now
        for share in [Spread(*(now / was - 1,) * 3)]
    ]
    if not found:
        raise BenchError(
            "the two runs have no load in common that was answered", "Run both with the same loads"
        )
    return found


def _levels(run: ServerRun | MatrixRun) -> dict[str, Level]:
    if isinstance(run, ServerRun):
        return {str(level): level for level in run.levels}
    return {str(cell): cell.level for cell in run.cells if cell.level is not None}


def _told(level: Level) -> Iterator[tuple[Figure, float]]:
    yield "tokens/s", level.total
    yield "of a user", level.after_first
    yield "first token, s", level.first_token[0] if level.first_token else 0.0
    yield "tau", level.tau or 0.0
    yield "good answers/s", level.good


def compare(before: Run, after: Run, limit: float, absolute: bool) -> list[Change]:
    """The changes of every setting that both runs measured.

    A figure is worse (better) when its whole interval is below -limit (above limit), which is a
    share: 0.05. Speedups compare with plain decoding in the same run, so that they hold on a
    machine that has become slower; absolute: tokens/s, too. BenchError if nothing can be compared.
    """
    old = {cell.setting: cell for cell in before.cells}
    found = [
        Change(
            setting=describe(new),
            figure=figure,
            before=median(was),
            after=median(now),
            relative=relative,
            verdict=_verdict(relative, 0.0 if figure == "identical texts" else limit),
        )
        for new in after.cells
        if new.setting in old
        for figure, was, now in _figures(before, after, old[new.setting], new)
        if figure != "tokens/s" or absolute
        for relative in [change(was, now) if any(was) else Spread(0.0, 0.0, 0.0)]
    ]
    if not found:
        raise BenchError(
            "the two runs have no setting in common that can be compared",
            "Run both with the same options; without the method plain add --absolute",
        )
    return found


def _figures(
    before: Run, after: Run, old: Cell, new: Cell
) -> Iterator[tuple[Figure, list[float], list[float]]]:
    """Each figure with its values before and after; a single value has no noise."""
    old_plain, new_plain = plain_of(before, old), plain_of(after, new)
    if new.method != "plain":
        yield "tau", [old.tau], [new.tau]
        if old_plain is not None and new_plain is not None:
            yield "speedup", speedups(old, old_plain), speedups(new, new_plain)
    if old.identical and new.identical:
        was, now = (same / texts for same, texts in (old.identical, new.identical))
        yield "identical texts", [was], [now]
    yield "tokens/s", rates(old), rates(new)


def _verdict(relative: Spread, limit: float) -> Verdict:
    if relative.high < -limit:
        return "worse"
    return "better" if relative.low > limit else "same"


def describe(cell: Cell) -> str:
    """A setting in words."""
    drafts = "auto" if cell.draft_tokens is None else str(cell.draft_tokens)
    parts = [cell.task, cell.method]
    parts += [f"{drafts} drafts"] * (cell.method != "plain")
    parts += [f"batch {cell.batch}", f"{cell.threads} thread{'s' * (cell.threads != 1)}"]
    parts += [f"context {cell.context}"] * (cell.context is not None)
    parts += [f"temperature {cell.temperature:g}"] * bool(cell.temperature)
    return ", ".join(parts)
