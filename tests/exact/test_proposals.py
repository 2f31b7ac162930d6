"""What else may draft: prompt lookup. The text stays the target's."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from built_pairs import BuildPair
from exact import run_all, scheduler_of

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import Request, SequenceState, in_process
from dflash_trt.decoding.speculation import CostProfile, Fixed, Proposer, Row, depths, strategy
from dflash_trt.decoding.speculation.proposer import NgramIndex
from dflash_trt.engines.info import read_info
from dflash_trt.engines.onnxruntime import Engine

QWEN3 = {"family": "qwen3", "heads": 4, "kv_heads": 2, "tied": True, "taps": (0, 2)}
NEW_TOKENS = 40


def test_lookup_knows_the_text_of_every_row(built_pair: BuildPair) -> None:
    built, compared = built_pair(**QWEN3), 0

    class Compared(Proposer):
        def rows(self, sequences: Sequence[SequenceState]) -> list[Row]:
            nonlocal compared
            rows = super().rows(sequences)
            for sequence, row in zip(sequences, rows, strict=True):
                whole = NgramIndex([*sequence.request.prompt, *sequence.tokens])
                for copied in row.proposals:
                    assert (copied.match, copied.tokens) == whole.find(len(copied.tokens))
                    compared += 1
            return rows

    rounds = in_process(Engine(built.target_engine), None)
    scheduler = scheduler_of(rounds, Fixed(5), Compared(5, lookup=True), slots=3, prefill_chunk=5)
    run_all(
        scheduler,
        [Request(x[: 9 + 4 * i], NEW_TOKENS - 4 * i) for i, x in enumerate(built.texts[:8])],
    )
    assert compared > 30


@pytest.mark.parametrize(("tree", "deepest", "drafts"), [(True, 3, 15), (False, 7, 7)])
def test_trees_are_no_deeper_than_the_smallest_window(
    built_pair: BuildPair, tree: bool, deepest: int, drafts: int
) -> None:
    """A chain may be: its tokens lie in the cache as in the text."""
    info = replace(read_info(built_pair(**QWEN3).target_engine, "onnxruntime"), window=3)
    costs = CostProfile([64], [1], [1, 16], [[[1.0, 1.0]]], [[1.0]])
    _, proposer = strategy(Speculation(lookup=False, tree=tree), info, costs)
    ids = np.arange(7 * 8).reshape(7, 8)
    probs = np.tile(np.array([[0.9] + [0.1 / 7] * 7], np.float32), (7, 1))
    sequence = SequenceState(Request([1, 2], NEW_TOKENS), [3], candidates=(ids, probs))
    ((((_, tokens, parents, *_),), *_),) = proposer.rows([sequence])
    assert (max(depths(tuple(parents))), len(tokens)) == (deepest, drafts)
    assert tokens[:3] == [0, 8, 16]


@pytest.mark.parametrize(("drafted", "contradicted"), [(4, False), (6, True), (None, False)])
def test_whether_the_drafter_contradicts_what_was_looked_up(
    drafted: int | None, contradicted: bool
) -> None:
    ids, probs = np.array([[drafted or 0]]), np.ones((1, 1), np.float32)
    candidates = None if drafted is None else (ids, probs)
    sequence = SequenceState(Request([3, 4, 5, 1, 2, 3], NEW_TOKENS), candidates=candidates)
    ((proposals, *_),) = Proposer(15, lookup=True).rows([sequence])
    assert [each.source for each in proposals] == [*["drafter"] * (drafted is not None), "lookup"]
    assert proposals[-1].tokens[:3] == [4, 5, 1]
    assert proposals[-1].contradicted == contradicted


def test_a_drafter_that_says_no_numbers_contradicts_nothing() -> None:
    """Its tree is empty: it is judged as any other, and does not hurt what is looked up."""
    candidates = np.arange(8).reshape(1, 8), np.full((1, 8), np.nan, np.float32)
    sequence = SequenceState(Request([3, 4, 5, 1, 2, 3], NEW_TOKENS), candidates=candidates)
    (((drafted, copied), *_),) = Proposer(15, max_depth=15, lookup=True).rows([sequence])
    assert (drafted.source, [*drafted.tokens]) == ("drafter", [])
    assert (copied.tokens[:2], copied.contradicted) == ([4, 5], False)
