"""Drafts under a grammar: what it forces, and the best candidates that it allows."""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from dflash_trt.decoding.grammar import Matcher
from dflash_trt.decoding.messages import Float32, Int64
from dflash_trt.decoding.speculation.proposal import Proposal

LOOKED_AT = 16  # candidates of a place, best first


class _Draft(NamedTuple):
    token: int
    value: float  # that the target takes it and all before it
    line: int  # of the probabilities of the candidates after it
    forced: tuple[int, ...] | None  # what the grammar forces after it; None: it was a candidate


def forced_drafts(matcher: Matcher, size: int, sampled: bool) -> list[Proposal]:
    """What the grammar forces after the text, if anything: drafts that no drafter is needed for."""
    tokens = matcher.forced(())[:size]
    n = len(tokens)
    forced = Proposal("grammar", tokens, range(n), [1.0] * n, sampled, forced=[True] * n)
    return [forced] if n else []


def best_drafts(
    matcher: Matcher, ids: Int64, probs: Float32, size: int, max_depth: int, sampled: bool
) -> Proposal:
    """As `tree.best_tree` and, with a max_depth of 0, `tree.best_chain`: but for what the grammar
    forbids, and where it forces tokens, with them in place of candidates."""
    lines, orders, candidates = probs.tolist(), (-probs).argsort(-1).tolist(), ids.tolist()

    def after(path: list[int], draft: _Draft) -> Iterator[_Draft]:
        depth = len(path)
        there = candidates[depth] if depth < len(candidates) else []
        if forced := draft.forced or matcher.forced(path):
            line = there.index(forced[0]) if forced[0] in there else 0
            yield _Draft(forced[0], draft.value, line, tuple(forced[1:]))
        elif there:
            line = min(draft.line, len(lines[depth]) - 1)
            order, chances = orders[depth][line][:LOOKED_AT], lines[depth][line]
            found = [i for i in order if matcher.allowed(path, [there[i]])]
            mass = sum(chances[i] for i in found) or 1.0  # all that the target's choice is of, too
            yield from (_Draft(there[i], draft.value * chances[i] / mass, i, None) for i in found)

    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    forced: list[bool] = []
    paths: list[list[int]] = [[]]
    heap: list[tuple[float, int, int, _Draft, Iterator[_Draft]]] = []
    turns = count()

    def offer(parent: int, drafts: Iterator[_Draft]) -> None:
        best = next(drafts, None)
        if best is not None and best.value > 0:
            heappush(heap, (-best.value, next(turns), parent, best, drafts))

    offer(0, after([], _Draft(0, 1.0, 0, None)))
    while heap and len(tokens) < size:
        _, _, parent, draft, others = heappop(heap)
        paths.append([*paths[parent], draft.token])
        tokens.append(draft.token)
        parents.append(parent)
        values.append(draft.value)
        forced.append(draft.forced is not None)
        if max_depth:
            offer(parent, others)
        if not max_depth or len(paths[-1]) < max_depth:
            offer(len(tokens), after(paths[-1], draft))
    return Proposal("drafter", tokens, parents, values, sampled, forced=forced)
