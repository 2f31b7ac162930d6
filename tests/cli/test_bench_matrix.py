"""`dflash-trt bench matrix` over the real server: loads, what fails, what goes on, the picture.

AIPerf is a stand-in that refuses what AIPerf 0.13 does (`tests/standins/aiperf.py`).
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.bench import Load, Matrix, matrix_table, run_matrix
from dflash_trt.config import BuildConfig
from tests.support.builds import config_of, quiet
from tests.support.commands import run
from tests.support.pycode import PYCODE, demo_config, prompt_texts

pytestmark = pytest.mark.models

CONFIG = PYCODE.parents[1] / "build_configs" / "pycode.yaml"
AIPERF = Path(__file__).parents[1] / "standins" / "aiperf.py"
OPTIONS = ("--concurrency=1", "--concurrency=2", "--requests", "2", "--max-tokens", "8")


@pytest.fixture
def aiperf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on PATH; it records each of its runs in a file."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    line = f'#!/bin/sh\necho "$@" >> {calls}\nexec {sys.executable} {AIPERF} "$@"\n'
    (folder / "aiperf").write_text(line)
    (folder / "aiperf").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    calls.touch()
    return calls


def matrix_of(config: BuildConfig, **changes: object) -> Matrix:
    made = Matrix(
        config=config,
        methods=("dflash",),
        users=(1, 2),
        prompts={"two": prompt_texts(2)},
        requests=2,
        max_tokens=8,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_one_command_to_the_picture_and_on_where_it_was(aiperf: Path, tmp_path: Path) -> None:
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    short.write_text("\n".join(json.dumps({"text": text}) for text in prompt_texts(2)))
    long.write_text(json.dumps({"messages": [{"role": "user", "content": "def f(x):\n" * 5000}]}))
    output = tmp_path / "out"
    command = ("bench", "matrix", CONFIG, "--output", output, *OPTIONS)
    code, out, err = run(*command, "--prompts", long, "--prompts", short)
    assert code == 1
    assert "error: 4 loads failed" in err, out
    first = json.loads((output / "matrix.json").read_text())
    assert len(first) == 8
    for load in first:
        assert bool(load["error"]) == (load["prompts"] == "long.jsonl")
        if not load["error"]:
            assert load["server"] > 0 < load["user"]
            assert load["tau"] == 1 if load["method"] == "none" else load["tau"] >= 1
    assert (output / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert len(aiperf.read_text().splitlines()) == 8

    long.write_text(json.dumps({"text": "def f(x):\n"}))
    code, out, err = run(*command, "--prompts", long, "--prompts", short)
    assert code == 0, err
    second = json.loads((output / "matrix.json").read_text())
    assert [load for load in second if load["prompts"] == "short.jsonl"] == [
        load for load in first if load["prompts"] == "short.jsonl"
    ]
    assert len(aiperf.read_text().splitlines()) == 12
    assert "why not" not in out
    assert [line.split(" |")[0] for line in out.rstrip().splitlines()[-8:]] == [
        f"| {method}, {users}, {prompts}"
        for method in ("none", "dflash")
        for users in ("1 user", "2 users")
        for prompts in ("long.jsonl", "short.jsonl")
    ]


def test_without_aiperf_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run("bench", "matrix", CONFIG, "--output", tmp_path / "out")
    assert code == 1
    assert "no program aiperf on PATH" in err
    assert "pip install aiperf" in err
    assert not (tmp_path / "out").exists()


def test_an_answer_that_is_missing_is_a_failed_load(aiperf: Path, tmp_path: Path) -> None:
    texts = ["def f(x):\n" * 5000, "def f"]
    matrix = matrix_of(demo_config(), users=(1,), prompts={"half": texts})
    (load,) = run_matrix(matrix, tmp_path / "out", quiet)
    assert "not every request was answered" in str(load.error)
    assert "aiperf.log" in str(load.error)


def test_a_method_that_cannot_be_built_or_served_has_its_reason(
    aiperf: Path, tmp_path: Path
) -> None:
    config = config_of(PYCODE, engine={"kind": "tensorrt_llm", "gpus": 1})
    loads = run_matrix(matrix_of(config), tmp_path / "out", quiet)
    assert len(loads) == 2
    assert all("machine lacks TensorRT-LLM" in str(load.error) for load in loads)
    loads = run_matrix(matrix_of(demo_config(), methods=("eagle3",)), tmp_path / "out", quiet)
    assert all("has no method eagle3" in str(load.error) for load in loads)


def test_another_setting_is_another_load() -> None:
    matrix = matrix_of(demo_config())
    load = Load(method="dflash", users=1, prompts="two")
    others = [
        replace(matrix, requests=3),
        replace(matrix, max_tokens=9),
        replace(matrix, prompts={"two": prompt_texts(3)}),
        replace(matrix, machine=["another"]),
        replace(matrix, users=(1, 64)),  # the server has more slots
        replace(matrix, config=matrix.config.model_copy(update={"name": "x"})),
    ]
    assert len({each.folder(load) for each in (matrix, *others)}) == 1 + len(others)
    assert replace(matrix, methods=("none", "dflash")).folder(load) == matrix.folder(load)
    salts = {each["cache_salt"] for each in matrix.payloads(load)}
    assert len(salts) == len(matrix.payloads(load)) == 1 + 2


def test_the_axes_are_those_of_published_figures() -> None:
    plain = Load(method="none", users=8, prompts="humaneval", gpus=8, server=440.0, user=100.0)
    dflash = replace(plain, method="dflash", server=630.0, user=250.0, tau=2.5)
    failed = replace(plain, method="eagle3", error="no head")
    assert plain.per_gpu == 55
    text = str(matrix_table([plain, dflash, failed]))
    assert "| load | tokens/s of a GPU | of a user | over none | tau |" in text
    assert "| none, 8 users, humaneval | 55 | 100 | 1.00 |  | 0 / 0 |  |" in text
    assert "| dflash, 8 users, humaneval | 79 | 250 | 1.43 | 2.50 | 0 / 0 |  |" in text
    assert "| eagle3, 8 users, humaneval |  |  |  |  |  | no head |" in text
