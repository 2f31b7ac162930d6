"""`dflash-trt bench compare`: what changed between two runs, beyond noise."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from dflash_trt.bench.results import Cell, Run
from dflash_trt.bench.stats import Spread, change, plain_of, rates, speedups
from dflash_trt.errors import BenchError

Figure = Literal["speedup", "tau", "identical texts", "tokens/s"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure of one setting, in both runs."""

    setting: str
    figure: Figure
    before: float
    after: float
    relative: Spread  # of the change; low and high are its interval
    verdict: Literal["worse", "better", "same"]


def compare(before: Run, after: Run, limit: float, absolute: bool) -> list[Change]:
    """Every setting that both runs measured.

    A figure is worse (better) when its whole interval is below -limit (above limit), which is a
    share: 0.05. Speedups compare with plain decoding in the same run, so that they hold on a
    machine that has become slower; absolute: tokens/s, too. BenchError if nothing can be compared.
    """
    old = {cell.setting: cell for cell in before.cells}
    pairs = [(old[cell.setting], cell) for cell in after.cells if cell.setting in old]
    found = [each for pair in pairs for each in _changes(before, after, *pair, limit, absolute)]
    if not found:
        raise BenchError(
            "the two runs have no setting in common that can be compared",
            "Run both with the same options; without the method plain add --absolute",
        )
    return found


def _changes(
    before: Run, after: Run, old: Cell, new: Cell, limit: float, absolute: bool
) -> Iterator[Change]:
    old_plain, new_plain = plain_of(before, old), plain_of(after, new)
    if new.method != "plain":
        yield _judged(new, "tau", old.tau, new.tau, _exact(old.tau, new.tau), limit)
        if old_plain is not None and new_plain is not None:
            yield _measured(
                new, "speedup", speedups(old, old_plain), speedups(new, new_plain), limit
            )
    if old.identical and new.identical:
        was, now = (same / of for same, of in (old.identical, new.identical))
        yield _judged(new, "identical texts", was, now, _exact(was, now), 0.0)
    if absolute:
        yield _measured(new, "tokens/s", rates(old), rates(new), limit)


def _measured(
    cell: Cell, figure: Figure, before: list[float], after: list[float], limit: float
) -> Change:
    relative = change(before, after)
    return _judged(cell, figure, median(before), median(after), relative, limit)


def _exact(before: float, after: float) -> Spread:
    """Of a figure without noise: the same texts have the same rounds."""
    by = after / before - 1 if before else 0.0
    return Spread(by, by, by)


def _judged(
    cell: Cell, figure: Figure, before: float, after: float, relative: Spread, limit: float
) -> Change:
    verdict: Literal["worse", "better", "same"] = "same"
    if relative.high < -limit:
        verdict = "worse"
    elif relative.low > limit:
        verdict = "better"
    return Change(
        setting=describe(cell),
        figure=figure,
        before=before,
        after=after,
        relative=relative,
        verdict=verdict,
    )


def describe(cell: Cell) -> str:
    """A setting in words."""
    drafts = "auto" if cell.draft_tokens is None else str(cell.draft_tokens)
    parts = [cell.task, cell.method]
    parts += [f"{drafts} drafts"] * (cell.method != "plain")
    parts += [f"batch {cell.batch}", f"{cell.threads} thread{'s' * (cell.threads != 1)}"]
    parts += [f"context {cell.context}"] * (cell.context is not None)
    parts += [f"temperature {cell.temperature:g}"] * bool(cell.temperature)
    return ", ".join(parts)
