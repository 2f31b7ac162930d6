"""`dflash-trt bench matrix` over the real server: cells, what fails, what goes on, the page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builds import config_of
from commands import run
from llm_build import STANDINS, standins
from pycode import PYCODE, demo_config, prompt_texts
from safetensors.numpy import save_file

from dflash_trt.bench import (
    Goal,
    Level,
    Load,
    Matrix,
    MatrixCell,
    MatrixRun,
    matrix_page,
    read_run,
    run_matrix,
    to_html,
    to_markdown,
    write_run,
)
from dflash_trt.bench.load import summarise
from dflash_trt.bench.matrix import _refused
from dflash_trt.bench.protocols import Answer
from dflash_trt.bench.results import kept
from dflash_trt.bench.stats import compare_servers
from dflash_trt.config import BuildConfig
from dflash_trt.errors import BenchError
from dflash_trt.files import read_as
from dflash_trt.serving.server.launch import environment, find_binary

CONFIG = PYCODE.parents[1] / "build_configs" / "pycode.yaml"
GOAL = Goal(first_token=0.5, inter_token=0.05)
OPTIONS = ("--concurrency", "1,2", "--requests", "2", "--max-tokens", "8")


def cells_in(directory: Path) -> dict[str, MatrixCell]:
    return {file.name: read_as(file, MatrixCell) for file in (directory / "cells").glob("*.json")}


def matrix_of(config: BuildConfig, **changes: object) -> Matrix:
    made = Matrix(
        config=config,
        methods=("dflash",),
        users=(1, 2),
        prompts={"two": prompt_texts(2)},
        thinking=("default",),
        requests=2,
        max_tokens=8,
        goal=GOAL,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def quiet(step: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def test_one_command_to_the_picture_and_on_where_it_was(tmp_path: Path) -> None:
    """The second run measures what failed and what is new, and nothing else."""
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    short.write_text("\n".join(json.dumps({"text": text}) for text in prompt_texts(2)))
    long.write_text(json.dumps({"text": "def f(x):\n" * 5000}))
    output = tmp_path / "out"
    command = ("bench", "matrix", CONFIG, "--output", output, *OPTIONS)
    code, out, err = run(*command, "--prompts", f"{long},{short}")
    assert code == 1
    assert "error: 4 cells failed" in err, out
    first = cells_in(output)
    assert len(first) == 8
    for cell in first.values():
        if cell.prompts == "long.jsonl":
            assert cell.level is None
            assert "tokens" in str(cell.error)
        else:
            assert cell.error is None
            assert cell.level
            assert (cell.level.requests, cell.level.tokens) == (2 * cell.users, 16 * cell.users)
            assert bool(cell.level.kept) == (cell.method == "dflash")
            assert not cell.level.cached_tokens
    assert "| none, 2 users, long.jsonl |" in out
    assert (output / "report.html").read_text().count("<svg") == 2

    long.write_text(json.dumps({"text": "def f(x):\n"}))
    code, out, _ = run(*command, "--prompts", f"{long},{short}", "--price", "36")
    assert code == 0
    second = cells_in(output)
    assert {name: cell for name, cell in second.items() if cell.prompts == "short.jsonl"} == {
        name: cell for name, cell in first.items() if cell.prompts == "short.jsonl"
    }
    assert "Not measured" not in out
    run_file = read_run(output / "matrix.json")
    assert isinstance(run_file, MatrixRun)
    assert [str(cell) for cell in run_file.cells] == [
        f"{method}, {users}, {prompts}"
        for method in ("none", "dflash")
        for users in ("1 user", "2 users")
        for prompts in ("long.jsonl", "short.jsonl")
    ]
    assert run_file.complete
    code, out, _ = run("bench", "compare", output / "matrix.json", output / "matrix.json")
    assert code == 0
    assert "once" in out
    assert "dflash, 2 users, short.jsonl" in out


def test_an_interrupt_leaves_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrix_of(demo_config(), users=(1,), methods=("none", "dflash"))

    def interrupted(step: str, done: int, total: int) -> None:
        if step.startswith("dflash"):
            raise KeyboardInterrupt

    run_ = run_matrix(matrix, tmp_path, {}, None, interrupted)
    assert not run_.complete
    assert [cell.method for cell in run_.cells] == ["none"]
    assert "Interrupted" in (tmp_path / "report.md").read_text()
    assert run_matrix(matrix, tmp_path, {}, None, quiet).complete
    assert len(cells_in(tmp_path)) == 2


def test_a_method_that_cannot_be_built_or_served_has_its_reason(tmp_path: Path) -> None:
    """Here TensorRT-LLM is missing; the others go on."""
    config = config_of(PYCODE, engine={"kind": "tensorrt_llm", "gpus": 1})
    made = run_matrix(matrix_of(config), tmp_path, {}, None, quiet)
    assert made.complete
    assert len(made.cells) == 2
    assert all("machine lacks TensorRT-LLM" in str(cell.error) for cell in made.cells)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `launch/mpi.sh` takes, which notes in a file that it was called: one task, and the
    Triton of the wheel."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    (tmp_path / "triton").mkdir()
    binary = find_binary(tmp_path / "triton")
    libraries = environment(binary)["LD_LIBRARY_PATH"]
    lines = {
        "mpirun": f'echo "$*" >> {calls}; while [ "$1" != bash ]; do shift; done; exec "$@"',
        "trtllm-llmapi-launch": 'export TLLM_SPAWN_PROXY_PROCESS=1; exec "$@"',
        "tritonserver": f"export LD_LIBRARY_PATH={libraries}\n"
        f'exec {binary.path} {" ".join(binary.arguments)} "$@"',
    }
    folder.mkdir()
    for name, line in lines.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    first = os.pathsep.join([str(folder), f"{sys.prefix}/bin"])
    monkeypatch.setenv("PATH", first, prepend=os.pathsep)
    return calls


def write_head(directory: Path) -> Path:
    """What the checks read of an EAGLE-3 head for the demo pair: the stand-in does not run it."""
    directory.mkdir()
    values = json.loads((PYCODE / "target" / "config.json").read_text())
    head = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    head |= {"draft_vocab_size": values["vocab_size"], "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(values | head))
    hidden = values["hidden_size"]
    tensors = {"fc.weight": np.zeros((hidden, 3 * hidden), np.float32)}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.models
def test_over_tensorrt_llms_published_api(
    container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in decodes by every method, each started by its launch script; its GPU counts, and
    is named."""
    drafters = {"eagle3": {"path": write_head(tmp_path / "head")}}
    drafters["draft_model"] = {"path": PYCODE / "target"}  # always right
    config = config_of(
        PYCODE,
        drafters=drafters,
        engine={"kind": "tensorrt_llm", "gpus": 1},
        serving={"max_seq_len": 512},
    )
    methods = ("none", "ngram", "eagle3", "draft_model", "dflash", "lilicorr")
    monkeypatch.syspath_prepend(str(STANDINS))
    with standins():
        made = run_matrix(matrix_of(config, methods=methods), tmp_path / "out", {}, None, quiet)
    *cells, lacking, same = made.cells
    assert "has no method lilicorr" in str(lacking.error)
    assert same.error == lacking.error
    assert [cell.method for cell in cells] == [name for name in methods[:-1] for _ in (1, 2)]
    for cell in cells:
        assert cell.error is None, cell
        assert cell.gpus == 1
        assert cell.level
        assert cell.level.tokens == 16 * cell.users
        assert bool(cell.level.kept) == (cell.method != "none")
        if cell.method == "draft_model":
            assert cell.level.kept[0] > 0.7  # but for last rounds
        assert cell.method != "dflash" or cell.level.kept[0] > 0.3
    assert container.read_text().count("-np 1") == len(methods) - 1
    left = subprocess.run(["pgrep", "-f", f"{tmp_path}/out"], capture_output=True, text=True)
    assert not left.stdout
    assert made.gpus == ["NVIDIA B300 SXM6 AC"]
    assert "1 x NVIDIA B300 SXM6 AC" in (tmp_path / "out" / "report.md").read_text()


def test_a_cell_belongs_to_what_it_was_measured_with() -> None:
    matrix = matrix_of(demo_config())
    cell = matrix.cells("dflash")[0]
    others = [
        replace(matrix, max_tokens=9),
        replace(matrix, prompts={"two": prompt_texts(1)}),
        replace(matrix, machine=["another"]),
        replace(matrix, users=(1, 64)),  # the server has more slots
        replace(matrix, goal=Goal(first_token=1, inter_token=1)),
        replace(matrix, config=matrix.config.model_copy(update={"name": "x"})),
    ]
    names = {each.file(cell) for each in (matrix, *others)}
    assert len(names) == 1 + len(others)
    assert replace(matrix, methods=("none", "dflash")).file(cell) == matrix.file(cell)


def test_ways_to_think_that_the_template_does_not_have(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PYCODE / "target", tmp_path / "target"))
    (folder / "chat_template.jinja").write_text(
        "{{ '<think>' if enable_thinking is not false }}{{ messages[0].content }}"
    )
    ways = {"default", "off", "on", "low", "high"}
    lacking = "the chat template has no reasoning_effort"
    assert _refused(folder, ways) == {"low": lacking, "high": lacking}
    (folder / "chat_template.jinja").write_text(
        "{{ reasoning_effort or 'medium' }} {{ messages[0].content }}"
    )
    assert set(_refused(folder, ways)) == {"off", "on"}
    messages = [[{"role": "user", "content": "x"}]]
    matrix = matrix_of(demo_config(), thinking=("low", "high"))
    both = replace(matrix, prompts={"texts": ["x"], "chats": messages})
    assert [(cell.prompts, cell.thinking) for cell in both.cells("none")[:3]] == [
        ("texts", "default"),
        ("chats", "low"),
        ("chats", "high"),
    ]


def level_of(users: int, speed: float) -> Level:
    """`users` answers of 11 tokens, each after 0.1 s at `speed` tokens/s, in rounds of 2 and 3."""
    end = 0.1 + 10 / speed
    answers = [Answer(0.0, [0.1, end], 7, 11, 4, round_tokens=[2, 3, 3, 2]) for _ in range(users)]
    return summarise(Load(users=users), [[each] for each in answers], 0.0, GOAL)


def test_the_axes_are_those_of_published_figures(tmp_path: Path) -> None:
    def cell(method: str, users: int, speed: float) -> MatrixCell:
        level = level_of(users, speed)
        return MatrixCell(
            method=method, users=users, prompts="humaneval", thinking="low", gpus=8, level=level
        )

    cells = [cell("none", 8, 100.0), cell("dflash", 8, 250.0)]
    failed = replace(cells[0], method="eagle3", level=None, error="no <head>")
    silent = summarise(Load(users=8), [[Answer(0.0, error="died")]], 0.0, GOAL)
    dead = replace(cells[0], method="ngram", level=silent, error="1 of 1 requests failed: died")
    made = MatrixRun(
        name="oss",
        hub={"target": "openai/gpt-oss-120b", "drafter": "z-lab/gpt-oss-120b-DFlash"},
        options={},
        cells=[*cells, failed, dead],
        price=72.0,
        complete=True,
        gpus=["B300"] * 8,
    )
    assert cells[0].per_gpu == pytest.approx(8 * 11 / 0.2 / 8)
    assert kept([2, 3, 3, 2]) == [1.0, 0.5]
    text = to_markdown(matrix_page(made))
    # 8 * 11 tokens in 0.2 s; an hour has 1.584 million of them
    assert "| none, 8 users, humaneval, thinking low | 55 | 100 |  |  | 100 / 100 | " in text
    assert "| 45.5 | 8 | 88 |" in text
    assert "| 79 | 250 | 2.50 / 1.43 | 2.50 |" in text
    assert "| dflash, 8 users, humaneval, thinking low | 1.00 | 0.50 |" in text
    assert "## Published for this pair" in text
    assert "| ngram, 8 users, humaneval, thinking low | 1 of 1 requests failed: died |" in text
    html = to_html(matrix_page(made))
    assert "output tokens/s of a GPU" in html
    assert "no &lt;head&gt;" in html

    write_run(tmp_path / "a.json", made)
    read = read_run(tmp_path / "a.json")
    assert read == made
    faster = replace(made, cells=[cell("dflash", 8, 500.0)])
    changes = {each.figure: each.relative.middle for each in compare_servers(made, faster)}
    assert changes["of a user"] == pytest.approx(1.0)
    assert changes["first token, s"] == pytest.approx(0.0)
    with pytest.raises(BenchError, match="no load in common"):
        compare_servers(made, replace(made, cells=[failed]))
