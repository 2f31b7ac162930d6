"""`dflash-trt bench engine` on the demo pair."""

from pathlib import Path

import pytest

from dflash_trt.bench import METHODS, Run, engine_report, sampling_rules
from dflash_trt.config import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.files import read_as
from tests.support.commands import run
from tests.support.pycode import prompt_ids

TOKENS = 24


@pytest.fixture(scope="module")
def measured(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return run.json: every method, two batches, two temperatures."""
    file = tmp_path_factory.mktemp("bench") / "run.json"
    done = run(
        *("bench", "engine", built, *(f"--methods={method}" for method in METHODS)),
        *("--draft-tokens=7", "--batch=1", "--batch=3", "--temperature=0", "--temperature=0.8"),
        *("--top-p=0.95", "--top-k=20"),
        *("--prompt-count", 3, "--max-tokens", TOKENS, "--repeats", 2),
        *("--output", file),
    )
    assert done.code == 0, done.err
    return file


def test_greedy_texts_have_no_other_rules() -> None:
    rules = sampling_rules([0.0, 0.6], [1.0, 0.95], [0, 20])
    assert [str(rule) for rule in rules] == [
        "",
        "temperature 0.6",
        "temperature 0.6, top_k 20",
        "temperature 0.6, top_p 0.95",
        "temperature 0.6, top_p 0.95, top_k 20",
    ]


@pytest.mark.models
def test_figures_are_those_of_verify(measured: Path, built: Path) -> None:
    measured_run = engine_run(measured)
    assert len(measured_run.cells) == 2 * 2 * len(METHODS)
    report = check_lossless(
        built / "engines", prompt_ids(3), TOKENS, Speculation(draft_tokens=7), lambda done: None
    )
    for cell in measured_run.cells:
        assert all(sample.tokens == 3 * TOKENS for sample in cell.samples)
        assert cell.identical == (6, 6)
        if cell.method == "plain":
            assert cell.tau == 1
            assert all(sample.rounds == 3 * (TOKENS - 1) for sample in cell.samples)
            # with three streams the first text is two rounds ahead when the last one begins
            full = 3 * (TOKENS - 1) if cell.batch == 1 else 3 * (TOKENS - 1 - 2)
            assert all(sample.full_tokens == full for sample in cell.samples)
        if (cell.method, cell.draft_tokens, cell.rule.temperature) == ("dflash", 7, 0):
            assert cell.tau == pytest.approx(report.tau)
            assert {s.rounds for s in cell.samples} == {report.rounds}
        for sample in cell.samples:
            parts = sample.verify, sample.draft, sample.scheduler, sample.prefill
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(sample.seconds)
            assert 0 < sample.full_seconds <= sample.seconds - sample.prefill + 1e-9


def test_the_report_holds_the_runs_figures(built: Path, tmp_path: Path) -> None:
    done = run(
        *("bench", "engine", built, "--methods=plain", "--methods=dflash", "--batch=1"),
        *("--prompt-count", 1, "--max-tokens", TOKENS, "--repeats", 1),
        *("--output", tmp_path / "run.json"),
    )
    assert done.code == 0, done.err
    measured_run = engine_run(tmp_path / "run.json")
    assert done.out == engine_report(measured_run) + "\n"
    drafted = [cell for cell in measured_run.cells if cell.method != "plain"]
    assert drafted
    assert all(f"| {cell.tau:.2f} |" in done.out for cell in drafted)
    assert measured_run.machine["cpu"] in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "medusa"], "no method medusa"),
        (["--batch", "99"], "--batch 99 is more than the engines'"),
        (["--draft-tokens", "8"], "--draft-tokens 8 is not 1 to 7"),
        (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, built: Path) -> None:
    code, _, err = run("bench", "engine", built, *arguments)
    assert code == 1
    assert message in err


def engine_run(file: Path) -> Run:
    return read_as(file, Run)
