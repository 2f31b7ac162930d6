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
)
from families import DENSE, FORMS, MOE
from op_profile import assert_in_profile

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


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("case", [*DENSE, "dflash2"], indirect=True)
def test_graph_stays_in_the_profile(case: Case, role: str) -> None:
    assert_in_profile(case.built.target_engine.parent / role / "model.onnx")


@pytest.mark.parametrize("case", [*DENSE, *MOE], indirect=True)
def test_build_and_verify(case: Case, tmp_path: Path) -> None:
    assert_build_and_verify(case, tmp_path)
