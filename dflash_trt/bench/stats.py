"""What passes over the same prompts say together."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from dflash_trt.bench.results import Cell, Run
from dflash_trt.decoding.speculation import VERIFIED

RESAMPLES = 2000
CONFIDENCE = 0.99


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some passes."""

    middle: float
    low: float
    high: float


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
    """Of each pass against the plain pass beside it: noise of the machine meets both."""
    return [own / its for own, its in zip(rates(cell), rates(plain), strict=False)]


def phases(cell: Cell) -> dict[str, float]:
    """Milliseconds of a round (a step of the whole batch) by what they went to; medians."""
    names = ("verify", "draft", "sampling", "scheduler")
    return {
        name: median(1e3 * getattr(sample, name) / max(sample.steps, 1) for sample in cell.samples)
        for name in names
    }


def verified(cell: Cell) -> dict[str, float]:
    """Shares of the rounds of single sequences, by what was verified (`offers.VERIFIED`)."""
    counts = [sum(sample.choices.get(name, 0) for sample in cell.samples) for name in VERIFIED]
    total = max(sum(counts), 1)
    return {name: count / total for name, count in zip(VERIFIED, counts, strict=True)}


def change(before: Sequence[float], after: Sequence[float]) -> Spread:
    """Relative change of the median: itself, and its bootstrap interval (`CONFIDENCE`)."""
    random = np.random.default_rng(0)
    medians = []
    for values in (before, after):
        drawn = random.integers(len(values), size=(RESAMPLES, len(values)))
        medians.append(np.median(np.array(values)[drawn], axis=1))
    ratios = medians[1] / medians[0] - 1
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Spread(median(after) / median(before) - 1, float(low), float(high))
