"""What a round costs on this machine: measured, and read off between what was measured."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.messages import RunRound, VerifyInput, verify_input
from dflash_trt.engines.info import most_verified
from dflash_trt.files import EXACT

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of a row; 1: plain decoding
CANDIDATES = 8  # that rounds ask for of each draft
SHORT = 64  # tokens, a multiple of BUCKET
BUCKET = 64  # contexts that share a figure
BUDGET = 5.0  # seconds, for MOST passes over all rounds; WORST times that for LEAST passes
WORST, LEAST, MOST = 4, 3, 16

Floats = npt.NDArray[np.float64]
Grid = tuple[list[int], list[int], list[int]]  # contexts, rows, widths


@dataclass(frozen=True)
class Costs:
    """Seconds of `verify` and of `draft`.

    By context (tokens in the cache of each row), rows (sequences in the batch) and width (tokens
    verified of each). ValueError for tables that do not fit these axes.
    """

    __pydantic_config__: ClassVar = EXACT

    contexts: list[int]
    rows: list[int]
    widths: list[int]
    verify_seconds: list[list[list[float]]]  # [context][rows][width]; hops of an ensemble included
    draft_seconds: list[list[float]]  # [context][rows]
    _found: dict[tuple[int, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        axes = (self.contexts, self.rows, self.widths)
        verify, draft = np.array(self.verify_seconds, float), np.array(self.draft_seconds, float)
        shape = tuple(map(len, axes))
        if not verify.size or (verify.shape, draft.shape) != (shape, shape[:2]):
            raise ValueError("a table does not fit its axes")
        if any(list(axis) != sorted({*axis}) for axis in axes):
            raise ValueError("an axis does not rise")
        # where nothing drafts that takes no time
        if not (np.isfinite(verify).all() and np.isfinite(draft).all()):
            raise ValueError("a time is not a number")
        if verify.min() <= 0 or draft.min() < 0:
            raise ValueError("a time is not positive")

    def verify(self, n: int, width: int, context: int) -> float:
        """Seconds to verify `width` tokens of each of n sequences; width 1 is plain decoding."""
        key = (n, width, context // BUCKET)
        seconds = self._found.get(key)
        if seconds is None:
            axes, point = (self.contexts, self.rows, self.widths), (key[2] * BUCKET, n, width)
            seconds = self._found[key] = float(_between(self.verify_seconds, axes, point))
        return seconds

    def draft(self, n: int, context: int) -> float:
        """Seconds to draft a block for each of n sequences."""
        key = (n, 0, context // BUCKET)
        seconds = self._found.get(key)
        if seconds is None:
            axes, point = (self.contexts, self.rows), (key[2] * BUCKET, n)
            seconds = self._found[key] = float(_between(self.draft_seconds, axes, point))
        return seconds

    def as_json(self) -> dict[str, Any]:
        """The arguments that make an equal one."""
        names = ("contexts", "rows", "widths", "verify_seconds", "draft_seconds")
        return {name: getattr(self, name) for name in names}


class _Round(NamedTuple):
    """A kind of round to be timed; width 0: one that drafts, of which only the draft counts."""

    context: int
    n: int
    width: int


def measure(
    run_round: RunRound,
    block_size: int,
    slots: int,
    max_seq_len: int,
    budget_seconds: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Time rounds on idle cache rows.

    To be called while no sequence is active: it writes to rows 0 .. slots-1. Takes
    `budget_seconds`, or up to WORST times that where rounds are slow; longer only where a single
    step of all rows takes seconds.
    """
    start, worst = clock(), WORST * budget_seconds
    widest = min(most_verified(block_size), max_seq_len)
    long = max_seq_len - 2 * widest  # room for a round and what it drafts
    contexts = [SHORT, long] if long > 2 * SHORT else [max(min(SHORT, long), 0)]

    def visit(kind: _Round, times: int) -> list[float]:
        """Seconds of this round, `times` times in a row, the first left out if it can be."""
        x, found = _input(kind, block_size), []
        for _ in range(times):
            began = clock()
            output = run_round(x)
            took = clock() - began - output.draft_seconds
            found.append(took if kind.width else output.draft_seconds)
        return found[1:] or found

    (plain,) = visit(_Round(contexts[0], 1, 1), 2)  # the first one reads the weights in
    most = []
    for context in contexts:
        (took,) = visit(_Round(context, slots, widest), 1)
        # the first of its shape binds buffers; of a slow engine that is little, and time is dear
        quick = took < budget_seconds / 10
        most += visit(_Round(context, slots, widest), 1) if quick else [took]
    for grid in _grids(contexts, slots, widest):
        kinds = list(_kinds(*grid))
        a_pass = 0.0
        for context, n, width in kinds:
            share = n * (width or 2 * block_size) / (slots * widest)
            a_pass += plain + share * max(most[contexts.index(context)] - plain, 0.0)
        if LEAST * a_pass <= worst:
            break
    # of a small engine a kind's first round after another's is slower, plain steps the most: it is
    # run three times in a row, where that leaves time for four passes
    rounds = 3 if 3 * 4 * a_pass <= budget_seconds else 1
    seconds: dict[_Round, list[float]] = {kind: [] for kind in kinds}
    began = clock()
    for passed in range(1, MOST + 1):
        # all kinds have their turn in every pass, so that noise of the machine meets all
        for kind in kinds:
            # what earlier rounds left for the drafter to catch up with is not counted either
            seconds[kind] += visit(kind, rounds if kind.width else max(rounds, 2))
        a_pass = (clock() - began) / passed
        if clock() - start + a_pass > (budget_seconds if passed >= LEAST else worst):
            break
    return _costs(grid, {kind: _typical(each) for kind, each in seconds.items()})


def _typical(seconds: list[float]) -> float:
    """The lower quartile: what else the machine does only ever adds.

    On a busy machine it spread half as much as the median from one measurement to the next.
    """
    return float(np.quantile(seconds, 0.25))


def _grids(contexts: list[int], slots: int, widest: int) -> Iterator[Grid]:
    """Grids to measure, from fine to coarse."""
    rows = [n for n in (1 << i for i in range(slots.bit_length())) if n < slots] + [slots]
    widths = [width for width in WIDTHS if width < widest] + [widest]
    doubling = [width for width in widths if not width & (width - 1) or width == widest]
    yield contexts, rows, widths
    yield contexts, rows, doubling
    yield contexts, _ends(rows), doubling
    for few in (doubling, _few(widths), _ends(widths)):
        yield contexts[:1], _ends(rows), few


def _ends(axis: list[int]) -> list[int]:
    return sorted({axis[0], axis[-1]})


def _few(widths: list[int]) -> list[int]:
    """Those of the long context: time that it adds is nearly linear in the width."""
    return sorted({*_ends(widths), *{4}.intersection(widths)})


def _kinds(contexts: list[int], rows: list[int], widths: list[int]) -> Iterator[_Round]:
    for context in contexts:
        columns = widths if context == contexts[0] else _few(widths)
        yield from (_Round(context, n, width) for n in rows for width in (*columns, 0))


def _costs(grid: Grid, seconds: dict[_Round, float]) -> Costs:
    contexts, rows, widths = grid
    short, few = contexts[0], _few(widths)
    verify = np.empty((len(contexts), len(rows), len(widths)))
    draft = np.array([[seconds[_Round(context, n, 0)] for n in rows] for context in contexts])
    for i, n in enumerate(rows):
        verify[0, i] = [seconds[_Round(short, n, width)] for width in widths]
        for j, context in enumerate(contexts[1:], 1):
            added = [seconds[_Round(context, n, w)] - seconds[_Round(short, n, w)] for w in few]
            verify[j, i] = verify[0, i] + np.interp(widths, few, np.maximum(added, 0.0))
    return Costs(contexts, rows, widths, _rising(verify).tolist(), _rising(draft).tolist())


def _rising(table: Floats) -> Floats:
    """A longer context, more rows or more tokens never take less time.

    Where it seems so it is noise, and the policy would run after a wide round that looks free. The
    middle of the running maximum and, from the end, the running minimum: a maximum alone would
    carry one slow outlier through all that is larger.
    """
    for axis in range(table.ndim):
        lowest = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
        table = (np.maximum.accumulate(table, axis) + lowest) / 2
    return table


def _between(table: Any, axes: Sequence[Sequence[int]], point: Sequence[int]) -> Any:
    """Linear between the table's points, and beyond the last; the first one's below the first."""
    found = np.asarray(table, np.float64)
    for axis, at in zip(axes, point, strict=True):
        if len(axis) == 1:
            found = found[0]
            continue
        i = min(max(int(np.searchsorted(axis, at, "right")) - 1, 0), len(axis) - 2)
        share = max((at - axis[i]) / (axis[i + 1] - axis[i]), 0.0)
        found = found[i] + share * (found[i + 1] - found[i])
    return found


def _input(kind: _Round, block_size: int) -> VerifyInput:
    """Greedy rows with any tokens."""
    context, n, width = kind
    drafts = 0 if width else block_size - 1
    width = width or min(4, block_size)  # a usual number of features to inject
    rows = [[width, 1, context, 2 * block_size]] * n
    return verify_input([0, drafts, CANDIDATES], rows, [[0] * width] * n)
