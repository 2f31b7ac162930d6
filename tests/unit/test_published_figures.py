"""Published figures: one place, each with its setting."""

import pytest
from published import PAIRS

from dflash_trt.planning import (
    expected_eagle,
    published_acceptance,
    published_data,
    published_models,
)
from dflash_trt.planning.published import acceptance_tables

QWEN = ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")


def test_pairs_are_those_that_were_published() -> None:
    pairs = {pair.drafter_hub: pair.target.hub for pair in PAIRS.values()}
    for drafter, values in published_models()["drafters"].items():
        assert pairs[drafter] == values["target"]
    for table in acceptance_tables():
        most = published_models()["drafters"][table.drafter]["config"]["block_size"]
        assert table.draft_tokens < most
        assert all(1 < tau <= table.draft_tokens + 1 for tau in table.tau.values())


def test_eagle_is_the_targets_own() -> None:
    """Those measured as a chain of three stand as they are; a deeper tree's is brought down."""
    known = {
        "openai/gpt-oss-120b": 2.8943,
        "Qwen/Qwen3-4B": 2.0281,
        "Qwen/Qwen3-8B": 2.45,
        "meta-llama/Llama-3.1-8B-Instruct": 2.65,
    }
    for target, tau in known.items():
        found, source = expected_eagle(target)
        assert found == pytest.approx(tau, abs=0.01)
        assert source.startswith("published (")
    tau, source = expected_eagle("org/another")
    assert (tau, "gpt-oss-120b" in source) == (2.8943, True)
    for entry in published_data()["eagle3"]:
        assert all(1 < tau <= entry["draft_tokens"] + 1 for tau in entry["tau"].values())


def test_one_table_for_plan_and_doctor() -> None:
    by_id, by_name = (published_acceptance(name) for name in (QWEN[1], "Qwen3-8B-DFlash-b16"))
    assert by_id is not None
    assert by_id == by_name == published_acceptance(QWEN[1], 15)
    assert by_id.source.endswith("Table 1")
    assert (by_id.tau["MATH-500"], by_id.temperature, len(by_id.tau)) == (7.87, 0, 7)
    short = published_acceptance("z-lab/gpt-oss-120b-DFlash", 3)
    assert short is not None
    assert short.tau["GSM8K"] == 3.3
    assert published_acceptance(QWEN[1], 4) is None
    assert published_acceptance("somebody/Qwen3-8B-DFlash-b16") is None
