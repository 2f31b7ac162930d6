"""Drafts as a tree: which of them are worth verifying together, and which of those stay.

A tree hangs on the anchor, token 0 of its row; `parents[i]` and `tokens[i]` are token i + 1's. A
parent comes before its children, so that the first nodes of a tree are a tree. A chain is the tree
with parents 0, 1, 2, ...
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.messages import Float32, Int64


class Tree(NamedTuple):
    """Drafts in the order of what they are worth."""

    tokens: list[int]
    parents: Sequence[int]
    values: list[float]  # that the target takes the node, according to the drafter; never rising


def best_chain(ids: Int64, probs: Float32) -> Tree:
    """The likeliest candidate at each place, after the one taken before.

    ids `[D, k]`; probs `[D, k, k]`: of candidate j if candidate i was taken before, at the first
    place all i alike; or `[D, 1, k]` where none depends on the one before.
    """
    tree, taken, value = Tree([], range(len(ids)), []), 0, 1.0
    rows = zip(ids.tolist(), probs.argmax(-1).tolist(), probs.max(-1).tolist(), strict=True)
    for candidates, best, highest in rows:
        before = min(taken, len(best) - 1)
        taken, value = best[before], value * highest[before]
        tree.tokens.append(candidates[taken])
        tree.values.append(value)
    return tree


def best_tree(ids: Int64, probs: Float32, size: int) -> Tree:
    """The `size` drafts of which most are expected to be accepted, the sum of `values`.

    A node's value is the product of the probabilities along its path; the best are taken, whose
    paths then are too (DDTree, arXiv 2604.12989). Trees are nested: the first nodes are the best
    tree of their number. Arguments as of `best_chain`, a place's candidates all different; fewer
    nodes come back where the others have no chance.
    """
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    lines, orders, candidates = probs.tolist(), (-probs).argsort(-1).tolist(), ids.tolist()
    # -value of a node that may be next, where it is, its parent and the parent's value, and which
    # line its probability is of; the first four differ, so that no two are compared further
    heap: list[tuple[float, int, int, int, float, int]] = []

    def offer(depth: int, rank: int, parent: int, above: float, line: int) -> None:
        value = above * lines[depth][line][orders[depth][line][rank]]
        if value > 0:
            heappush(heap, (-value, depth, rank, parent, above, line))

    if candidates:
        offer(0, 0, 0, 1.0, 0)
    while heap and len(tokens) < size:
        negative, depth, rank, parent, above, line = heappop(heap)
        taken = orders[depth][line][rank]
        tokens.append(candidates[depth][taken])
        parents.append(parent)
        values.append(-negative)
        if rank + 1 < len(candidates[depth]):
            offer(depth, rank + 1, parent, above, line)
        if depth + 1 < len(candidates):
            below = min(taken, len(lines[depth + 1]) - 1)
            offer(depth + 1, 0, len(tokens), -negative, below)
    return Tree(tokens, parents, values)


def walk(
    tokens: Sequence[int], parents: Sequence[int], own: Callable[[list[int]], int | None]
) -> tuple[list[int], int | None]:
    """The accepted drafts, as numbers among the row's tokens, and the target's token after them.

    `own` is given the path so far and says the target's own token there, once for each node that
    is reached; None if that is not known yet, which ends the walk. Whatever the tree holds, the
    text is the target's: sample and match.
    """
    children = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True), 1)}
    path: list[int] = []
    node = 0
    while True:
        token = own(path)
        child = None if token is None else children.get((node, token))
        if child is None:
            return path, token
        path.append(child)
        node = child


@lru_cache(maxsize=1024)
def ancestors(parents: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """`[S, S]`, S = 1 + len(parents): whether a row's token i sees token j, itself or above it."""
    seen = np.eye(1 + len(parents), dtype=bool)
    for node, parent in enumerate(parents, 1):
        seen[node, :node] = seen[parent, :node]
    seen.flags.writeable = False  # it is shared
    return seen


@lru_cache(maxsize=1024)
def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """`[S]`: how far each of a row's tokens is from the anchor, whose depth is 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return tuple(found)
