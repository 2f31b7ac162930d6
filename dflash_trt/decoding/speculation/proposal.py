"""What may be verified in a round, a chain or a tree of drafts, and what is."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

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


SOURCES = ("target", "drafter", "lookup", "prompt", "grammar")  # who wrote a token
# of a row in a round: no drafts, or which kind
VERIFIED = ("plain", "chain", "tree", "lookup", "grammar")


class Proposal(NamedTuple):
    """Draft tokens for one sequence; the first ones of them are a proposal, too."""

    source: Literal["drafter", "lookup", "grammar"]
    tokens: Sequence[int]
    parents: Sequence[int]  # as in `tree.Tree`
    values: Sequence[float] = ()  # that each is accepted, according to the drafter
    sampled: bool = False  # for a request that has a temperature
    match: int = 0  # tokens alike before what was looked up
    contradicted: bool = False  # whether the drafter's first token is another
    forced: Sequence[bool] = ()  # which of them the grammar forces; empty without a grammar

    def cut(self, length: int) -> "Proposal":
        """The first `length` draft tokens of it."""
        return self._replace(
            tokens=self.tokens[:length],
            parents=self.parents[:length],
            values=self.values[:length],
            forced=self.forced[:length],
        )

    def sources(self, nodes: Iterable[int]) -> list[int]:
        """Who proposed these of its drafts (1: the first), by place in `SOURCES`."""
        own, grammar = SOURCES.index(self.source), SOURCES.index("grammar")
        return [grammar if self.forced and self.forced[node - 1] else own for node in nodes]

    @property
    def kind(self) -> str:
        """One of `VERIFIED`."""
        if self.source != "drafter":
            return self.source
        return "chain" if self.is_chain else "tree"

    @property
    def is_chain(self) -> bool:
        return isinstance(self.parents, range) or self.parents == [*range(len(self.parents))]


class Row(NamedTuple):
    """What there is to choose from for one sequence."""

    proposals: Sequence[Proposal]
    sampled: bool  # whether its request has a temperature
    out_of_sync: bool = False  # whether the drafter lacks features of it, and drafts no more


class StepPlan(NamedTuple):
    """What a round does."""

    chosen: Sequence[Proposal | None]  # what is verified of each row
    draft_tokens: int  # how many the drafter is asked for afterwards; 0: it does not run
    rest: int = 0  # rounds to follow that are plain decoding, without another plan

    @property
    def width(self) -> int:
        """Draft tokens of a row at most."""
        return max((len(each.tokens) for each in self.chosen if each), default=0)
