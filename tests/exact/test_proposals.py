"""What else may draft: prompt lookup and a small language model. The text stays the target's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import BuildPair
from exact import run_all, scheduler_of

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    DraftModel,
    Request,
    SamplingParams,
    Sequence,
    in_process,
    rounds_with,
)
from dflash_trt.decoding.speculation.costs import Costs
from dflash_trt.decoding.speculation.lookup import PromptLookup, Suffixes
from dflash_trt.decoding.speculation.policy import Fixed
from dflash_trt.decoding.speculation.proposals import Proposer
from dflash_trt.decoding.speculation.tree import depths
from dflash_trt.engines.info import read_info
from dflash_trt.engines.onnxruntime import Engine

QWEN3 = {"family": "qwen3", "heads": 4, "kv_heads": 2, "tied": True, "taps": (0, 2)}
NEW_TOKENS = 40


@pytest.mark.parametrize("prefill_chunk", [5, 64])
@pytest.mark.parametrize("which", ["lookup", "another model", "itself"])
def test_text_is_the_targets_own(built_pair: BuildPair, which: str, prefill_chunk: int) -> None:
    """Batched, with rows that move; the target as its own draft model is always right."""
    built = built_pair(**QWEN3)
    other = built_pair(**QWEN3, seed=1)  # another model of the same vocabulary
    target = Engine(built.target_engine)
    proposals = {
        "lookup": lambda: PromptLookup(),
        "another model": lambda: DraftModel(Engine(other.target_engine)),
        "itself": lambda: DraftModel(Engine(built.target_engine)),
    }
    requests = [
        Request(text[: 9 + 4 * i], NEW_TOKENS - 5 * i) for i, text in enumerate(built.texts[:4])
    ]
    plain = scheduler_of(in_process(target, None), Fixed(0))
    expected = [s.tokens for s in run_all(plain, requests)]
    rounds = rounds_with(target, proposals[which]())
    drafting = scheduler_of(rounds, Fixed(5), slots=3, prefill_chunk=prefill_chunk)
    sequences = run_all(drafting, requests)
    assert [s.tokens for s in sequences] == expected
    accepted = sum(s.accepted for s in sequences)
    assert accepted == 0 if which == "another model" else accepted > 0
    if which == "itself":
        assert {n for s in sequences for n in s.committed_per_round[:-1]} == {6}


def test_lookup_knows_the_text_of_every_row(built_pair: BuildPair) -> None:
    """Prompts that come in chunks, rows that move, texts that follow others in a row."""
    built = built_pair(**QWEN3)
    rounds = rounds_with(Engine(built.target_engine), PromptLookup())
    scheduler = scheduler_of(rounds, Fixed(5), slots=3, prefill_chunk=5)
    for i, text in enumerate(built.texts[:8]):
        scheduler.submit(Request(text[: 9 + 4 * i], NEW_TOKENS - 4 * i))
    compared = 0
    while scheduler.busy:
        scheduler.step()
        for sequence in scheduler.sequences:
            whole = Suffixes([*sequence.request.prompt, *sequence.tokens])
            if sequence.candidates is not None:
                drafts = sequence.candidates[0][:, 0].tolist()
                assert drafts == whole.find(len(drafts))[1]
                compared += 1
    assert compared > 30


def test_sampled_text_has_the_targets_distribution(built_pair: BuildPair) -> None:
    """The second token of 2,000 texts each, which is the first that a draft may become."""
    built = built_pair(**QWEN3)
    target = Engine(built.target_engine)
    prompt = [5, 6, 7, 5, 6, 7, 5]

    def second_tokens(rounds: object) -> np.ndarray:
        scheduler = scheduler_of(rounds, Fixed(2))  # type: ignore[arg-type]
        requests = [Request(prompt, 2, SamplingParams(1.0, seed=seed)) for seed in range(2000)]
        return np.array([s.tokens[1] for s in run_all(scheduler, requests)])

    lookup = second_tokens(rounds_with(target, PromptLookup()))
    alone = second_tokens(in_process(target, None))
    counts = [np.bincount(x, minlength=320) for x in (lookup, alone)]
    common = np.argsort(-counts[1])[:5]
    for token in common:
        a, b = counts[0][token], counts[1][token]
        assert abs(a - b) < 4.5 * np.sqrt(a + b)


@pytest.mark.parametrize(("tree", "deepest", "drafts"), [(True, 3, 15), (False, 7, 7)])
def test_trees_are_no_deeper_than_the_smallest_window(
    built_pair: BuildPair, tree: bool, deepest: int, drafts: int
) -> None:
    """A chain may be: its tokens lie in the cache as in the text."""
    info = replace(read_info(built_pair(**QWEN3).target_engine, "onnxruntime"), window=3)
    costs = Costs([64], [1], [1, 16], [[[1.0, 1.0]]], [[1.0]])
    proposer = Proposer(Speculation(lookup=False, correction=False, tree=tree), costs, info)
    ids = np.arange(7 * 8).reshape(7, 8)
    probs = np.tile(np.array([[0.9] + [0.1 / 7] * 7], np.float32), (7, 1))
    sequence = Sequence(Request([1, 2], NEW_TOKENS), [3], candidates=(ids, probs))
    ((offers, *_),) = proposer.rows([sequence], 2)
    ((_, tokens, parents, *_),) = offers
    assert (max(depths(tuple(parents))), len(tokens)) == (deepest, drafts)
    assert tokens[:3] == [0, 8, 16]


@pytest.mark.parametrize(("drafted", "doubted"), [(4, False), (6, True), (None, False)])
def test_what_was_looked_up_is_doubted_where_the_drafter_says_otherwise(
    built_pair: BuildPair, drafted: int | None, doubted: bool
) -> None:
    info = read_info(built_pair(**QWEN3).target_engine, "onnxruntime")
    costs = Costs([64], [1], [1, 16], [[[1.0, 1.0]]], [[1.0]])
    proposer = Proposer(Speculation(tree=False, correction=False), costs, info)
    ids, probs = np.array([[drafted or 0]]), np.ones((1, 1), np.float32)
    candidates = None if drafted is None else (ids, probs)
    sequence = Sequence(Request([3, 4, 5, 1, 2, 3], NEW_TOKENS), candidates=candidates)
    ((offers, *_),) = proposer.rows([sequence], 6)
    assert [offer.source for offer in offers] == ["drafter"] * (drafted is not None) + ["lookup"]
    assert offers[-1].tokens[:3] == [4, 5, 1]
    assert offers[-1].doubted == doubted


def test_a_drafter_that_says_no_numbers_says_nothing_otherwise(built_pair: BuildPair) -> None:
    """Its tree is empty: it is judged as any other, and does not hurt what is looked up."""
    info = read_info(built_pair(**QWEN3).target_engine, "onnxruntime")
    costs = Costs([64], [1], [1, 16], [[[1.0, 1.0]]], [[1.0]])
    proposer = Proposer(Speculation(), costs, info)
    candidates = np.arange(8).reshape(1, 8), np.full((1, 8), np.nan, np.float32)
    sequence = Sequence(Request([3, 4, 5, 1, 2, 3], NEW_TOKENS), candidates=candidates)
    (((drafted, copied), *_),) = proposer.rows([sequence], 6)
    assert (drafted.source, [*drafted.tokens]) == ("drafter", [])
    assert (copied.tokens[:2], copied.doubted) == ([4, 5], False)
