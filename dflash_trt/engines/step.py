"""What rounds ask of an engine, of any kind, and the tensors of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash_trt.engines.info import EngineInfo

NOTHING = -1  # in place of a cache row: see `Engine.move_row`
KEPT = 2**32  # numbers from here on are no cache rows, but of tokens that are kept beside them
Tensors = dict[str, tuple[type[np.generic], tuple[int, ...]]]  # dtype and shape of each


@dataclass(frozen=True)
class Step:
    """Arrays as the graph names them, bound to one call of it."""

    inputs: dict[str, Any]  # int64; mask bool, features float32
    outputs: dict[str, Any]  # top_ids int64; the others float32
    run: Callable[[], object]


class BoundSteps(dict[tuple[int, ...], Step]):
    """An engine's steps by what `Engine.step` was asked for, each bound when it is first wanted."""

    def __init__(self, most: int) -> None:
        """most: how many are kept; then the oldest makes room."""
        super().__init__()
        self._most = most

    def of(self, bind: Callable[..., Step], *key: int) -> Step:
        """bind: makes the step of a key. It is not kept, so that an engine ends with its last
        user."""
        step = self.get(key)
        if step is None:
            if len(self) >= self._most:
                del self[next(iter(self))]
            step = bind(*key)
            self[key] = step
        return step


class Engine(Protocol):
    """A loaded model with its KV caches, `[slots, kv_heads, cache_len, head_dim]`.

    Only steps, `move_row` and `keep_tokens` touch the caches; a caller rolls back by passing a
    lower `write_index` the next time.
    """

    info: EngineInfo
    visible_step: int  # `visible` is best a multiple of this, so that few steps are bound
    least_rows: int  # tokens and head rows of a step, at least: see `onnxruntime.least_rows`

    def step(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int = 0
    ) -> Step:
        """A step of the sequences in cache rows `row .. row+n-1`, to be filled in and run.

        width: tokens of each sequence; visible: cache rows that the mask covers; scored: head rows
        in all; context: a drafter's feature rows of each sequence. The arrays belong to the
        engine: all of the inputs are to be filled before each run, since other steps may lie in the
        same memory, and outputs are overwritten by the next one.
        """

    def move_row(self, source: int, destination: int, tokens: int, start: int = 0) -> None:
        """Copy one sequence's tokens `start .. start+tokens-1` to the same place of another row.

        From NOTHING come zeros: a masked entry must be finite, since it is multiplied by 0. One of
        both may be a number from KEPT on: these tokens alone are kept under it, in place of what
        was there, or come from it. To NOTHING: they are kept no longer.
        """

    def keep_tokens(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Close ranks behind a tree of drafts, of which some were accepted.

        In the cache of one sequence the entries at `start + kept[j]` move to `start + j`; kept is
        rising. Those that are already in place cost nothing.
        """


def token_moves(start: int, kept: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where, in this order: none lands on one that is still to be moved."""
    return [(start + token, start + j) for j, token in enumerate(kept) if token != j]


def cache_names(info: EngineInfo) -> dict[tuple[int, int], list[str]]:
    """The caches' names by their kv heads and head_dim: those alike lie together, so that a token
    is moved in all layers at once.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for layer, shape in enumerate(info.caches):
        found.setdefault(shape, []).extend((f"key_{layer}", f"value_{layer}"))
    return found


def step_tensors(
    info: EngineInfo, n: int, width: int, visible: int, scored: int, context: int
) -> tuple[Tensors, Tensors]:
    """Inputs and outputs of a step but for the caches; see `Engine.step`."""
    inputs: Tensors = {
        "tokens" if info.role == "target" else "block": (np.int64, (n, width)),
        "positions": (np.int64, (n, context + width)),
        "write_index": (np.int64, (n,)),
        "mask": (np.bool_, (n, 1, width, visible)),
        "head_rows": (np.int64, (scored,)),
    }
    outputs: Tensors = {
        "top_ids": (np.int64, (scored, info.best)),
        "top_logits": (np.float32, (scored, info.best)),
        "logits": (np.float32, (scored, info.vocab_size)),
    }
    if info.role == "target" and info.feature_size:
        outputs["features"] = (np.float32, (n, width, info.feature_size))
    elif info.role == "drafter":
        inputs["features"] = (np.float32, (n, context, info.feature_size))
    if info.pair_scores:
        outputs["pair_scores"] = (np.float32, (scored, info.best, info.best))
    return inputs, outputs
