"""Published figures: one place, each with its setting."""

import pytest

from dflash_trt.planning import (
    expected_eagle,
    published_data,
)


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
