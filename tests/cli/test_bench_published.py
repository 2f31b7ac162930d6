"""Published figures: one place, each with its setting, beside a run and never in it."""

from __future__ import annotations

import pytest
from commands import run
from published import PAIRS

from dflash_trt.bench import Run, engine_page
from dflash_trt.roofline import (
    expected_eagle,
    published_acceptance,
    published_data,
    published_rows,
)
from dflash_trt.roofline.published import acceptance_tables

QWEN = ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")


def test_pairs_are_those_that_were_published() -> None:
    pairs = {pair.drafter_hub: pair.target.hub for pair in PAIRS.values()}
    for drafter, values in published_data()["drafters"].items():
        assert pairs[drafter] == values["target"]
    for table in acceptance_tables():
        most = published_data()["drafters"][table.drafter]["config"]["block_size"]
        assert table.draft_tokens < most
        assert all(1 < tau <= table.draft_tokens + 1 for tau in table.tau.values())
        assert set(table.times) <= set(table.tau)


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


def test_what_was_only_claimed_is_shown_as_such() -> None:
    rows = published_rows("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash")
    assert [row["speedup"] for row in rows] == ["up to 5.8", "up to 5.6", "up to 5.3"]
    assert {(row["hardware"], row["tau"]) for row in rows} == {("1 x B300, vLLM", "")}


def test_two_settings_of_one_task_are_told_apart() -> None:
    """Table 1 is Transformers on an H200, Table 3 SGLang on a B200: both are right."""
    found = [row for row in published_rows(*QWEN) if row["task"] == "MATH-500"]
    greedy = [row for row in found if "temperature 1" not in row["source"]]
    assert {(row["tau"], row["hardware"]) for row in greedy} == {
        ("8.01", "1 x B200, SGLang"),
        ("7.87", "1 x H200, Transformers"),
        ("5.82", "1 x H200, Transformers"),  # with thinking
    }
    assert len({row["source"] for row in found}) == len(found)
    # Table 3's own speedups, which are not in the data: tokens/s are
    assert found[0]["speedup"] == "5.1, 4.5, 4.5, 3.9, 2.8"


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


def test_a_report_shows_them_beside_its_own() -> None:
    def titles(**hub: str) -> list[str]:
        run = Run(name="x", target="t", drafter="d", options={}, cells=[], peak_memory=1, hub=hub)
        return [table.title for table in engine_page(run).tables]

    own = titles()
    assert titles(target=QWEN[0], drafter=QWEN[1]) == [*own, "Published for this pair"]
    assert titles(target="Qwen/Qwen3-8B-Base", drafter=QWEN[1]) == own  # another target
    assert titles(drafter=QWEN[1]) == own


def test_by_command() -> None:
    code, out, _ = run("bench", "published", "oss-20b")
    assert code == 0
    assert "| MT-Bench | 7 | 8 | 2.0 | 4.20 |" in out
    assert "120b" not in out
    code, _, err = run("bench", "published", "nothing")
    assert code == 1
    assert "Known: z-lab/" in err
