"""Every target family and every form of a drafter, against `transformers` and z-lab's `dflash`."""

from __future__ import annotations

from pathlib import Path

import pytest
from exact import (
    Case,
    assert_build_and_verify,
    assert_drafter_logits,
    assert_same_text_and_same_rounds,
    assert_target_logits_and_taps,
    rounds_of,
    run_all,
    scheduler_of,
)
from families import DENSE, FORMS, MOE
from op_profile import assert_in_profile

from dflash_trt.decoding import Request
from dflash_trt.decoding.speculation import Fixed

pytestmark = pytest.mark.models


@pytest.mark.parametrize("case", [*DENSE, *MOE], indirect=True)
def test_target_logits_and_taps(case: Case) -> None:
    assert_target_logits_and_taps(case)


@pytest.mark.parametrize("case", [*DENSE, *FORMS, "dflash2"], indirect=True)
def test_drafter_logits(case: Case) -> None:
    """With the target's embedding as it is stored and its head."""
    assert_drafter_logits(case)


@pytest.mark.parametrize("case", [*DENSE, *MOE, *FORMS, "dflash2"], indirect=True)
def test_same_text_and_same_rounds(case: Case) -> None:
    assert_same_text_and_same_rounds(case)


@pytest.mark.parametrize("case", DENSE, indirect=True)
def test_same_texts_side_by_side(case: Case) -> None:
    """In one batch, at different positions, with prompts that go in by chunks."""
    scheduler = scheduler_of(rounds_of(case.built), Fixed(7), prefill_chunk=7)
    sequences = run_all(scheduler, [Request(prompt, case.new_tokens) for prompt in case.prompts])
    assert [sequence.tokens for sequence in sequences] == case.greedy


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("case", [*DENSE, "dflash2"], indirect=True)
def test_graph_stays_in_the_profile(case: Case, role: str) -> None:
    assert_in_profile(case.built.target_engine.parent / role / "model.onnx")


@pytest.mark.parametrize("case", [*DENSE, *MOE], indirect=True)
def test_build_and_verify(case: Case, tmp_path: Path) -> None:
    assert_build_and_verify(case, tmp_path)
