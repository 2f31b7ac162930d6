"""`dflash-trt bench engine` and `bench compare`, on the demo pair."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from commands import run
from pycode import prompt_ids

from dflash_trt.bench import (
    METHODS,
    Cell,
    Plan,
    Run,
    Sample,
    ServerRun,
    compare,
    engine_page,
    full_rates,
    measure_engine,
    read_run,
    to_html,
    to_markdown,
    write_run,
)
from dflash_trt.bench import engine as bench_engine
from dflash_trt.bench import run as bench_run
from dflash_trt.bench.engine import tokens_of
from dflash_trt.bench.passes import Pass
from dflash_trt.bench.stats import change
from dflash_trt.config import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.errors import BenchError, RequestError

TOKENS = 24


@pytest.fixture(scope="module")
def measured(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.json and a report: every method, two batches, two temperatures."""
    folder = tmp_path_factory.mktemp("bench")
    done = run(
        *("bench", "engine", built, "--methods", ",".join(METHODS)),
        *("--draft-tokens", "7", "--batch", "1,3", "--temperature", "0,0.8"),
        *("--prompt-count", 3, "--max-tokens", TOKENS, "--repeats", 2, "--draft-model", built),
        *("--output", folder / "run.json", "--report", folder / "report"),
    )
    assert done.code == 0, done.err
    return folder


def test_figures_are_those_of_verify(measured: Path, built: Path) -> None:
    """Tokens, rounds, tau and texts, exactly."""
    measured_run = engine_run(measured / "run.json")
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
        if (cell.method, cell.draft_tokens, cell.temperature) == ("dflash", 7, 0):
            assert cell.tau == pytest.approx(report.tau)
            assert {s.rounds for s in cell.samples} == {report.rounds}
        if (cell.method, cell.draft_tokens, cell.temperature) == ("draft-model", 7, 0):
            assert cell.tau > 6  # the target is its own draft model
        for sample in cell.samples:
            parts = sample.verify, sample.draft, sample.sampling, sample.scheduler, sample.prefill
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(sample.seconds)
            assert 0 < sample.full_seconds <= sample.seconds - sample.prefill + 1e-9
            assert sum(sample.choices.values()) == sample.rounds


def test_the_report_holds_the_runs_figures(measured: Path) -> None:
    measured_run = engine_run(measured / "run.json")
    html = (measured / "report" / "report.html").read_text()
    markdown = (measured / "report" / "report.md").read_text()
    assert html == to_html(engine_page(measured_run))
    assert markdown == to_markdown(engine_page(measured_run))
    assert html.count("<svg") == 3
    assert not re.search(r'(src|href)="', html)  # nothing is fetched
    for cell in measured_run.cells:
        if cell.method != "plain":
            assert f"<td>{cell.tau:.2f}</td>" in html
            assert f"| {cell.tau:.2f} |" in markdown
    assert measured_run.machine["cpu"] in markdown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "medusa"], "no method medusa"),
        (["--batch", "99"], "--batch 99 is more than the engines'"),
        (["--draft-tokens", "8"], "--draft-tokens 8 is not 1 to 7"),
        (["--draft-tokens", "many"], "'many' is no number"),
        (["--batch", "0"], "--batch 0: 0 is too small"),
        (["--temperature", "nan"], "nan is too small"),
        (["--context", "4000"], "a prompt of 4000 tokens"),
        (["--methods", "draft-model"], "needs a model"),
        (["--prompts", "synthetic:x"], "not synthetic:1 to"),
        (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, built: Path) -> None:
    code, _, err = run("bench", "engine", built, *arguments)
    assert code == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--users", "0"], "there is no load"),
        (["--users", "0", "--rates", "0"], "--rates 0: 0 is too small"),
    ],
)
def test_a_load_of_nothing_is_refused(arguments: list[str], message: str) -> None:
    code, _, err = run("bench", "serve", "127.0.0.1:1", *arguments)
    assert code == 1
    assert message in err


def test_an_interrupted_run_says_so(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows what it has, and exits as what Ctrl-C ends does."""

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "measure_with_threads", interrupted)
    code, out, _ = run("bench", "engine", built)
    assert code == 130
    assert "Interrupted" in out


def measure(built: Path) -> Run:
    """Plain and DFlash on two prompts, in this process."""
    ways = ("plain", "dflash")
    plan = Plan(tasks={"pycode": prompt_ids(2)}, max_tokens=16, methods=ways, repeats=5)
    cells: list[Cell] = []
    measure_engine(built / "engines", 2, plan, lambda done, total: None, cells.append)
    return a_run(cells)


def test_texts_end_one_after_another(built: Path) -> None:
    """The first ones of a batch, so that its sequences are of different lengths from then on."""
    plan = Plan(
        tasks={"pycode": prompt_ids(6)},
        max_tokens=16,
        staggered=True,
        methods=("plain",),
        batches=(4,),
        repeats=1,
    )
    assert [tokens_of(plan, 4, i) for i in range(6)] == [4, 8, 12, 16, 16, 16]
    cells: list[Cell] = []
    measure_engine(built / "engines", 2, plan, lambda done, total: None, cells.append)
    assert cells[0].samples[0].tokens == 4 + 8 + 12 + 3 * 16


@pytest.mark.parametrize(("batch", "rows"), [(2, {0, 2}), (4, {0})])
def test_ways_change_places(
    batch: int, rows: set[int], built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are cache rows for all of them: each has been on all rows in the end."""
    places: dict[str, list[int]] = {}
    run_in_turns = bench_engine.run_in_turns

    def watched(passes: Sequence[Pass]) -> None:
        for each in passes:
            places.setdefault(each._decoder.cell.method, []).append(each._decoder.first_row)
        run_in_turns(passes)

    monkeypatch.setattr(bench_engine, "run_in_turns", watched)
    plan = Plan(
        tasks={"pycode": prompt_ids(batch)},
        max_tokens=8,
        methods=("plain", "dflash"),
        batches=(batch,),
        repeats=2,
    )
    measure_engine(built / "engines", 2, plan, lambda done, total: None, lambda cell: None)
    assert {name: {*found} for name, found in places.items()} == {"plain": rows, "dflash": rows}


class Paced:
    """What `run_in_turns` asks of a `passes.Pass`, of so many tokens at a pace."""

    def __init__(self, pace: float, most: int) -> None:
        self.pace, self._most = pace, most
        self.turns: list[float] = []
        self.kept = False

    @property
    def ended(self) -> bool:
        return bool(self.turns) and self.turns[-1] >= self._most

    def run(self, tokens: float) -> None:
        self.turns.append(tokens)

    def keep(self) -> None:
        self.kept = True


@pytest.mark.parametrize(
    ("slowest", "turns"), [(0.04, [1, 3.5, 6, 8.5, 11]), (1.0, [1, 2, 3]), (0.001, [1, 33, 65])]
)
def test_turns_are_short_and_end_at_the_same_place(slowest: float, turns: list[float]) -> None:
    passes = [Paced(slowest / 4, int(turns[-1])), Paced(slowest, int(turns[-1]))]
    bench_engine.run_in_turns(passes)  # type: ignore[arg-type]
    assert [each.turns for each in passes] == [turns, turns]
    assert all(each.kept for each in passes)


def test_a_planted_slowdown_is_found(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = measure(built)
    in_process = import_module("dflash_trt.decoding.in_process")  # the room exports its function
    draft = in_process.draft

    def slower(*arguments: object) -> object:
        time.sleep(0.02)
        return draft(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(in_process, "draft", slower)
    after = measure(built)
    verdicts = {each.figure: each.verdict for each in compare(before, after, 0.05, False)}
    assert verdicts["speedup"] == "worse"
    assert verdicts["tau"] == verdicts["identical texts"] == "same"
    back = {each.figure: each.verdict for each in compare(after, before, 0.05, False)}
    assert back["speedup"] == "better"


def a_run(cells: list[Cell]) -> Run:
    return Run(name="x", target="t", drafter="d", options={}, cells=cells, peak_memory=1)


def engine_run(file: Path) -> Run:
    found = read_run(file)
    assert isinstance(found, Run)
    return found


def drawn_run(random: np.random.Generator, *, slower: float = 1.0, machine: float = 1.0) -> Run:
    """Plain decoding at 100 tokens/s and DFlash at 250 on a machine with noise of some percent."""
    cells = []
    for method, rate in (("plain", 100.0), ("dflash", 250.0 / slower)):
        seconds = machine * 1000 / rate * random.lognormal(0, 0.03, size=5)
        samples = [
            Sample(
                seconds=each,
                tokens=1000,
                rounds=400,
                steps=400,
                verify=0.0,
                draft=0.0,
                sampling=0.0,
                scheduler=0.0,
                prefill=0.0,
                choices={},
            )
            for each in seconds
        ]
        cells.append(
            Cell(
                task="t",
                method=method,
                draft_tokens=7 if method == "dflash" else 0,
                batch=1,
                context=None,
                threads=2,
                temperature=0.0,
                samples=samples,
                kept=[0.5, 0.2] if method == "dflash" else [],
                identical=(4, 4),
            )
        )
    return a_run(cells)


def test_noise_is_not_flagged_and_a_change_is() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        before = drawn_run(random)
        same = compare(before, drawn_run(random, machine=1.5), 0.05, False)
        assert {each.verdict for each in same} == {"same"}
        worse = compare(before, drawn_run(random, slower=1.3), 0.05, False)
        assert [e.verdict for e in worse if e.figure == "speedup"] == ["worse"]
        slow_machine = compare(before, drawn_run(random, machine=1.5), 0.05, True)
        assert [e.verdict for e in slow_machine if e.figure == "tokens/s"] == ["worse", "worse"]


def test_rates_in_the_long_run() -> None:
    """100 tokens share a second for the prompts; 50 of them took 2 s with all streams busy."""
    cell = drawn_run(np.random.default_rng(0)).cells[0]
    (sample, *_) = cell.samples
    one = replace(sample, tokens=100, prefill=1.0, full_seconds=2.0, full_tokens=50)
    short = replace(sample, tokens=100, seconds=4.0, full_seconds=0.0, full_tokens=0)
    assert full_rates(replace(cell, samples=[one, short])) == [pytest.approx(20), 25]


def test_another_text_and_fewer_accepted_drafts_are_worse() -> None:
    before = drawn_run(np.random.default_rng(0))
    plain, dflash = before.cells
    after = replace(before, cells=[plain, replace(dflash, kept=[0.4, 0.2], identical=(3, 4))])
    verdicts = {e.figure: e.verdict for e in compare(before, after, 0.05, False)}
    assert verdicts == {"tau": "worse", "speedup": "same", "identical texts": "worse"}


def test_the_interval_holds_the_change() -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        before, after = (random.normal(mean, 0.05, size=9) for mean in (1.0, 1.2))
        interval = change(before.tolist(), after.tolist())
        held += interval.low <= 0.2 <= interval.high
    assert held >= 93


def test_compare_by_files(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    write_run(tmp_path / "a.json", drawn_run(random))
    write_run(tmp_path / "b.json", drawn_run(random, slower=1.3))
    a, b, d = (tmp_path / f"{name}.json" for name in "abd")
    assert run("bench", "compare", a, a).code == 0
    code, out, _ = run("bench", "compare", a, b)
    assert code == 1
    assert "worse   speedup" in out
    code, out, _ = run("bench", "compare", a, b, "--json")
    assert code == 1
    changes = json.loads(out)["changes"]
    assert [each["verdict"] for each in changes] == ["same", "same", "worse", "same"]
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(RequestError, match="is not a result"):
        read_run(tmp_path / "c.json")
    write_run(d, ServerRun(url="u", protocol="openai", options={}, levels=[]))
    for other, said in ((a, "one is a run of engines"), (d, "no load in common")):
        code, _, err = run("bench", "compare", d, other)
        assert code == 1
        assert said in err
    empty = replace(engine_run(a), cells=[])
    with pytest.raises(BenchError, match="no setting in common"):
        compare(empty, empty, 0.05, False)


def test_prompts_of_a_length() -> None:
    prompts = [[1, 2, 3], [4, 5]]
    assert bench_engine.of_length(prompts, 2) == [[1, 2], [4, 5]]
    assert bench_engine.of_length(prompts, 7) == [[1, 2, 3, 4, 5, 1, 2], [4, 5, 1, 2, 3, 4, 5]]
