"""Lossless, on pairs no one trained: our engines against `transformers` and z-lab's `dflash`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Request,
    Round,
    RoundResult,
    RunRound,
    SamplingParams,
    check_lossless,
    in_process,
    lossless,
)
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.engines.step import Engine as AnyEngine
from dflash_trt.speculation import Fixed
from tests.support import reference
from tests.support.built_pairs import SLOTS, BuildPair
from tests.support.equality import (
    NEW_TOKENS,
    Case,
    assert_drafter_logits,
    assert_same_text_and_same_rounds,
    assert_target_logits_and_taps,
    case_for,
    rounds_of,
    run_all,
    scheduler_of,
)

# families, GQA ratios 1, 2, 4, heads tied and not, blocks of 4, 8, 16,
# 1 to 8 taps, tap counts other than the drafter's layer count
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-gqa1-tied-b8-1tap": {"heads": 4, "kv_heads": 4, "taps": (1,), "draft_layers": 2},
    "qwen3-gqa2-untied-b16-8taps": {
        "layers": 10,
        "taps": (0, 1, 2, 3, 4, 6, 7, 8),
        "draft_layers": 2,
        "tied": False,
        "block_size": 16,
    },
    "qwen3-gqa4-tied-b4-3taps": {
        "kv_heads": 1,
        "taps": (0, 1, 2),
        "block_size": 4,
        "hidden": 48,  # heads * head_dim is not hidden_size
        "head_dim": 32,
    },
    "llama-gqa2-tied-b8-5taps": {
        "family": "llama",
        "layers": 7,
        "taps": (5, 1, 2, 0, 4),  # features follow the list's order, not the layers'
        "draft_layers": 2,
    },
}
CaseOf = Callable[[str], Case]


@pytest.fixture(scope="module")
def case_of(built_pair: BuildPair) -> CaseOf:
    @cache
    def get(name: str) -> Case:
        return case_for(built_pair(seed=list(SHAPES).index(name), **SHAPES[name]))

    return get


FIRST, *OTHERS = SHAPES


@pytest.fixture(scope="module", params=[pytest.param(FIRST, marks=pytest.mark.models), *OTHERS])
def case(request: pytest.FixtureRequest, case_of: CaseOf) -> Case:
    return case_of(request.param)


def test_target_logits_and_taps(case: Case) -> None:
    assert_target_logits_and_taps(case)


def test_drafter_logits(case: Case) -> None:
    assert_drafter_logits(case)


def test_same_text_and_same_rounds(case: Case) -> None:
    assert_same_text_and_same_rounds(case)


@pytest.mark.parametrize("name", ["qwen3-gqa2-untied-b16-8taps", "llama-gqa2-tied-b8-5taps"])
def test_rounds_do_not_depend_on_neighbors(name: str, case_of: CaseOf) -> None:
    """Near its end a text is drafted with fewer masks, and none of a longer neighbor's."""
    case = case_of(name)
    scheduler = scheduler_of(rounds_of(case.built), Fixed(case.built.drafter.spec.block_size - 1))
    requests = [Request(prompt, count) for count in range(2, 40, 7) for prompt in case.prompts]
    for sequence, request in zip(run_all(scheduler, requests), requests, strict=True):
        (alone,) = run_all(scheduler, [request])
        assert sequence.committed_per_round == alone.committed_per_round


ONE = "llama-gqa2-tied-b8-5taps"


@pytest.mark.parametrize("drafts", range(1, 8))
def test_any_draft_length(drafts: int, case_of: CaseOf) -> None:
    """With fewer drafts than a block the text stays; the drafts are those of a whole block."""
    case = case_of(ONE)
    scheduler = scheduler_of(rounds_of(case.built), Fixed(drafts))
    sequences = run_all(scheduler, [Request(prompt, NEW_TOKENS) for prompt in case.prompts])
    assert [s.tokens for s in sequences] == case.greedy
    pair = case.built.pair
    for sequence, prompt, greedy in zip(sequences, case.prompts, case.greedy, strict=True):
        assert sequence.committed_per_round == reference.round_lengths(
            pair.target_dir, pair.drafter_dir, prompt, greedy, drafts
        )


def test_verify_notices_what_neighbors_change(
    case_of: CaseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is right about every prompt alone, and wrong about the last of several."""
    case = case_of(ONE)
    engines, speculation = case.built.target_engine.parent, Speculation(draft_tokens=7)
    found = check_lossless(engines, case.prompts, NEW_TOKENS, speculation, lambda done: None)
    assert (found.identical, found.first_mismatch) == (4, None)

    def broken(target: AnyEngine, drafter: AnyEngine | None) -> RunRound:
        rounds = in_process(target, drafter)

        def run(round: Round) -> RoundResult:
            result = rounds(round)
            if len(round.sequences) == SLOTS:
                result.results[-1].token ^= 1
            return result

        return run

    monkeypatch.setattr(lossless, "in_process", broken)
    found = check_lossless(engines, case.prompts, NEW_TOKENS, speculation, lambda done: None)
    assert found.identical < found.total == 4
    assert found.first_mismatch is not None
    assert found.first_mismatch.together
    assert found.outputs == case.greedy


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(logprobs=1), SamplingParams(0.7, seed=1)]
)
@pytest.mark.parametrize("drafts", [0, 7])
@pytest.mark.parametrize("position", [8, 20])  # while its prompt is taken in, and behind it
def test_a_row_without_numbers_fails_alone(
    sampling: SamplingParams, drafts: int, position: int, case_of: CaseOf
) -> None:
    """The next sequence in its slot does not notice either."""
    case = case_of(ONE)
    target = Engine(case.built.target_engine)
    rounds = in_process(target, Engine(case.built.drafter_engine) if drafts else None)
    scheduler = scheduler_of(rounds, Fixed(drafts), slots=2, prefill_chunk=4)
    first = scheduler.submit(Request(case.prompts[0], NEW_TOKENS))
    broken = scheduler.submit(Request(case.prompts[1], NEW_TOKENS, sampling))
    after = scheduler.submit(Request(case.prompts[2][:5], NEW_TOKENS))
    while broken.position < position:
        scheduler.step()
    row = scheduler.sequences.index(broken)
    for caches in target._alike:
        caches[:, row, :, 0] = np.nan
    while scheduler.has_work:
        scheduler.step()
    assert [s.finish_reason for s in (first, broken, after)] == ["length", "error", "length"]
    assert first.tokens == case.greedy[0]
    (expected,) = reference.greedy(case.built.pair.target_dir, [case.prompts[2][:5]], NEW_TOKENS)
    assert after.tokens == expected
