"""Trees of drafts: the best of all, what is kept of them, and that it goes on as a chain."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact import TOLERANCE, assert_kept_tokens_are_a_chain
from families import DRAFTER, FAMILIES
from pairs import write_pair
from test_sharding import engines_of

from dflash_trt.decoding.speculation.proposal import (
    Tree,
    ancestors,
    best_chain,
    best_tree,
    depths,
    walk,
)
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.engines.step import token_moves

DEPTH, WIDTH, MOST = 3, 3, 5
Node = tuple[int, ...]  # which candidate at each depth


def made_up(seed: int, *shape: int) -> Any:
    """Probabilities; the candidates do not have all of it."""
    return 0.9 * np.random.default_rng(seed).dirichlet(np.full(WIDTH, 0.7), shape)


def trees(size: int) -> Iterator[frozenset[Node]]:
    """All of them."""
    found: set[frozenset[Node]] = {frozenset()}
    for _ in range(size):
        found = {
            tree | {(*parent, i)}
            for tree in found
            for parent in [(), *tree]
            for i in range(WIDTH)
            if len(parent) < DEPTH and (*parent, i) not in tree
        }
    yield from found


def assert_best(find: Callable[[int], Tree], value: Callable[[Node], float]) -> None:
    whole = find(MOST)
    places = paths(whole)
    assert len({*places}) == MOST  # no token twice under one parent
    np.testing.assert_allclose(whole.values, [value(place) for place in places], rtol=1e-12)
    assert whole.values == sorted(whole.values, reverse=True)
    for size, total in enumerate(accumulate(whole.values), 1):
        assert find(size) == Tree(*(line[:size] for line in whole))
        best = max(sum(map(value, tree)) for tree in trees(size))
        assert total == pytest.approx(best, rel=1e-12)


def paths(tree: Tree) -> list[Node]:
    """Where the nodes are; tokens are 10 * depth + candidate."""
    found: list[Node] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert parent < len(found)
        assert token // 10 == len(found[parent])
        found.append((*found[parent], token % 10))
    return found[1:]


IDS = np.array([[10 * depth + i for i in range(WIDTH)] for depth in range(DEPTH)])


@pytest.mark.parametrize("seed", range(8))
def test_no_tree_is_better(seed: int) -> None:
    probs = -np.sort(-made_up(seed, DEPTH), axis=-1)
    assert_best(
        lambda size: best_tree(IDS, probs[:, None], size),
        lambda node: float(np.prod([probs[d, i] for d, i in enumerate(node)])),
    )
    # the same whatever was taken before, and in whatever order candidates come
    given = np.broadcast_to(probs[:, None], (DEPTH, WIDTH, WIDTH))
    whole = best_tree(IDS, probs[:, None], 20)
    assert best_tree(IDS, given, 20) == whole
    assert best_tree(IDS[:, ::-1], probs[:, None, ::-1], 20) == whole


@pytest.mark.parametrize("seed", range(8))
def test_no_tree_is_better_where_a_draft_depends_on_the_one_before(seed: int) -> None:
    probs = made_up(seed, DEPTH, WIDTH)
    probs[0] = probs[0, 0]

    def value(node: Node) -> float:
        return float(np.prod([probs[d, (0, *node)[d], i] for d, i in enumerate(node)]))

    assert_best(lambda size: best_tree(IDS, probs, size), value)
    tokens, _, values = best_chain(IDS, probs)
    path = tuple(token % 10 for token in tokens)
    assert path[0] == probs[0, 0].argmax()
    assert list(path[1:]) == [probs[d, path[d - 1]].argmax() for d in range(1, DEPTH)]
    np.testing.assert_allclose(values, [value(path[: d + 1]) for d in range(DEPTH)], rtol=1e-12)


def test_what_has_no_chance_is_left_out() -> None:
    certain = np.array([[[1.0, 0.0, 0.0]]] * DEPTH)
    assert best_tree(IDS, certain, 9) == Tree([0, 10, 20], [0, 1, 2], [1.0] * 3)
    given = np.array([[[0.0, 1.0, 0.0]] * WIDTH] * DEPTH)
    assert best_tree(IDS, given, 9).tokens == [1, 11, 21]
    assert best_tree(IDS[:0], certain[:0], 9) == best_tree(IDS, certain, 0) == Tree([], [], [])
    assert len(best_tree(IDS, np.array([[[0.5, 0.3, 0.2]]] * DEPTH), 99).tokens) == 3 + 9 + 27
    nothing = np.full((DEPTH, 1, WIDTH), np.nan)  # of a broken drafter
    assert best_tree(IDS, nothing, 9) == Tree([], [], [])


#        0
#      /   \
#     1(7)  2(8)
#    /  \     \
#  3(8) 5(7)  4(7)
TOKENS, PARENTS = [7, 8, 8, 7, 7], (0, 0, 1, 2, 1)


@pytest.mark.parametrize(
    ("text", "path", "token"),
    [
        ([9], [], 9),
        ([7, 9], [1], 9),
        ([7, 7, 7], [1, 5], 7),
        ([7, 8, 5], [1, 3], 5),
        ([8, 8], [2], 8),
        ([8, 7, 1], [2, 4], 1),
    ],
)
def test_a_walk_follows_the_targets_own_tokens(
    text: list[int], path: list[int], token: int
) -> None:
    asked: list[list[int]] = []

    def own(so_far: list[int]) -> int:
        asked.append([*so_far])
        return text[len(so_far)]

    assert walk(TOKENS, PARENTS, own) == (path, token)
    assert asked == [path[:i] for i in range(len(path) + 1)]
    for known in range(len(path) + 1):  # as far as that goes
        first = dict(enumerate(text[:known]))
        assert walk(TOKENS, PARENTS, by_length(first)) == (path[:known], None)


def by_length(tokens: dict[int, int]) -> Callable[[list[int]], int | None]:
    return lambda path: tokens.get(len(path))


def test_ancestors_and_depths() -> None:
    assert depths(PARENTS) == (0, 1, 1, 2, 2, 2)
    seen = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 5]]
    assert [np.flatnonzero(row).tolist() for row in ancestors(PARENTS)] == seen
    assert (ancestors((0, 1, 2)) == np.tri(4, dtype=bool)).all()
    assert depths((0, 1, 2)) == (0, 1, 2, 3)
    assert (depths(()), ancestors(()).tolist()) == ((0,), [[True]])


def test_only_what_is_not_in_place_moves() -> None:
    assert token_moves(7, [0, 1, 4, 6]) == [(11, 9), (13, 10)]
    assert token_moves(7, range(5)) == []


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss"])  # two of them with windows
def test_what_is_kept_goes_on_as_a_chain(family: str, tmp_path: Path) -> None:
    engines = engines_of(write_pair(tmp_path, FAMILIES[family](), DRAFTER), tmp_path, 1)
    engine = Engine(engines / "target")
    assert engine.info.window == (None if family == "qwen3" else 10)
    assert_kept_tokens_are_a_chain(engine, TOLERANCE)
