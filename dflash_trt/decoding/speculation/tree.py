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

Line = Sequence[float]
Siblings = tuple[Line, Sequence[int]]  # the candidates' probabilities, and their order, best first


class Tree(NamedTuple):
    """Drafts in the order of what they are worth."""

    tokens: list[int]
    parents: list[int]
    values: list[float]  # that the target takes the node, by the drafter's word; never rising


def best_first(ids: Sequence[Sequence[int]], probs: Sequence[Line], most: int) -> Tree:
    """The `most` drafts of which most are expected to be accepted, the sum of `values`.

    A node's value is the product of the probabilities along its path; the best are taken, whose
    paths then are too (DDTree, arXiv 2604.12989). Trees are nested: the first nodes are the best
    tree of their number. ids, probs `[D, k]`: candidates of each depth, all different, best first;
    fewer nodes come back where the others have no chance.
    """
    return _grow(ids, lambda depth, taken: (probs[depth], range(len(probs[depth]))), most)


def best_first_given(
    ids: Sequence[Sequence[int]], probs: Sequence[Sequence[Line]], most: int
) -> Tree:
    """`best_first` where probabilities depend on the parent: probs `[D, k, k]`, in any order, of
    candidate j if candidate i was taken before; at depth 0 all i are alike.
    """

    def siblings(depth: int, taken: int) -> Siblings:
        line = probs[depth][taken]
        return line, sorted(range(len(line)), key=line.__getitem__, reverse=True)

    return _grow(ids, siblings, most)


def _grow(
    ids: Sequence[Sequence[int]], siblings: Callable[[int, int], Siblings], most: int
) -> Tree:
    tree = Tree([], [], [])
    # -value of a node that may be next, where it is, the value of its parent, and its siblings;
    # the first four differ, so that no two are compared further
    heap: list[tuple[float, int, int, int, float, Siblings]] = []

    def offer(depth: int, rank: int, parent: int, above: float, line: Siblings) -> None:
        value = above * line[0][line[1][rank]]
        if value > 0:
            heappush(heap, (-value, depth, rank, parent, above, line))

    if ids:
        offer(0, 0, 0, 1.0, siblings(0, 0))
    while heap and len(tree.tokens) < most:
        negative, depth, rank, parent, above, line = heappop(heap)
        taken = line[1][rank]
        tree.tokens.append(ids[depth][taken])
        tree.parents.append(parent)
        tree.values.append(-negative)
        if rank + 1 < len(line[1]):
            offer(depth, rank + 1, parent, above, line)
        if depth + 1 < len(ids):
            offer(depth + 1, 0, len(tree.tokens), -negative, siblings(depth + 1, taken))
    return tree


def walk(
    tokens: Sequence[int], parents: Sequence[int], own: Callable[[list[int]], int | None]
) -> tuple[list[int], int | None]:
    """The accepted drafts, as numbers among the row's tokens, and the target's token behind them.

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
