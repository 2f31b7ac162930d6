"""Proposals: chains or trees of drafts, and the plan of a round."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.messages import Float32, Int64


class Tree(NamedTuple):
    """Drafts in order of decreasing value."""

    tokens: list[int]
    parents: Sequence[int]
    values: list[float]  # the drafter's probability that a node is accepted; never increasing


def best_chain(ids: Int64, probs: Float32) -> Tree:
    """Return the likeliest candidate at each position, given the one before.

    ids `[D, k]`; probs `[D, k, k]`: probability of candidate j after candidate i, rows equal at the
    first position; `[D, 1, k]` if independent of the one before.
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
    """Return the tree of `size` drafts with the most expected accepted tokens, the sum of `values`.

    A node's value is the product of probabilities along its path; the best nodes form a tree
    (DDTree, arXiv 2604.12989). Trees are nested: any first nodes are the best tree of that size.
    Arguments as in `best_chain`, with distinct candidates per position. Nodes of probability 0 are
    left out.
    """
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    lines, orders, candidates = probs.tolist(), (-probs).argsort(-1).tolist(), ids.tolist()
    # negative value, depth, rank and parent of a possible next node; the parent's value; the row of
    # probabilities. The first four differ, so comparison never goes further
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
    """Return the accepted nodes and the target's token after them.

    `own` returns the target's token after a path, None if unknown, which ends the walk. It is
    called once per node reached. The text is the target's whatever the tree holds.
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
    """Return whether token i attends to token j: `[S, S]`, S = 1 + len(parents)."""
    seen = np.eye(1 + len(parents), dtype=bool)
    for node, parent in enumerate(parents, 1):
        seen[node, :node] = seen[parent, :node]
    seen.flags.writeable = False  # shared by the cache
    return seen


@lru_cache(maxsize=1024)
def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return `[S]` distances from the anchor, whose depth is 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return tuple(found)


SOURCES = ("target", "drafter", "lookup", "prompt", "grammar")  # origin of a token
# what a round verified for a row
VERIFIED = ("plain", "chain", "tree", "lookup", "grammar")


class Proposal(NamedTuple):
    """Draft tokens for one sequence; any prefix of them is a proposal too."""

    source: Literal["drafter", "lookup", "grammar"]
    tokens: Sequence[int]
    parents: Sequence[int]  # as in `Tree`
    values: Sequence[float] = ()  # the drafter's probability that each is accepted
    sampled: bool = False  # the request has a temperature
    match: int = 0  # length of the n-gram match
    contradicted: bool = False  # the drafter's first token differs
    forced: Sequence[bool] = ()  # which tokens the grammar forces; empty without one

    def cut(self, length: int) -> "Proposal":
        """Return the first `length` drafts."""
        return self._replace(
            tokens=self.tokens[:length],
            parents=self.parents[:length],
            values=self.values[:length],
            forced=self.forced[:length],
        )

    def sources(self, nodes: Iterable[int]) -> list[int]:
        """Return the source of these drafts (1: the first), as indices in `SOURCES`."""
        own, grammar = SOURCES.index(self.source), SOURCES.index("grammar")
        return [grammar if self.forced and self.forced[node - 1] else own for node in nodes]

    @property
    def kind(self) -> str:
        """The kind of proposal, one of `VERIFIED`."""
        if self.source != "drafter":
            return self.source
        return "chain" if self.is_chain else "tree"

    @property
    def is_chain(self) -> bool:
        return isinstance(self.parents, range) or self.parents == [*range(len(self.parents))]


class Row(NamedTuple):
    """Proposals for one sequence."""

    proposals: Sequence[Proposal]
    sampled: bool  # whether its request has a temperature
    out_of_sync: bool = False  # whether the drafter lacks features of it and drafts no more


class StepPlan(NamedTuple):
    """The plan of a round."""

    chosen: Sequence[Proposal | None]  # proposal to verify for each row
    draft_tokens: int  # requested of the drafter afterwards; 0: it does not run
    rest: int = 0  # plain rounds to follow without a new plan

    @property
    def width(self) -> int:
        """The largest number of drafts in a row."""
        return max((len(each.tokens) for each in self.chosen if each), default=0)
