"""Prompts by the name of a task, without a network.

`fetch` is replaced by rows with the columns that each dataset's card on the Hub lists; what it does
with the real library is shown on a directory and on files of this machine.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run
from datasets import Dataset

from dflash_trt.bench import load_asked, load_task
from dflash_trt.bench import prompts as tasks
from dflash_trt.bench.prompts import TASKS, Task
from dflash_trt.chat.render import as_chat
from dflash_trt.errors import RequestError

ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# by task: a row, and the prompt that z-lab's benchmark makes of it
SAMPLES = json.loads((Path(__file__).parents[1] / "samples" / "tasks.json").read_text())
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    name: (each["row"], each["prompt"]) for name, each in SAMPLES.items()
}


@pytest.fixture(autouse=True)
def no_wheels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one test are of the Hub."""
    if "wheel" not in request.node.name:
        monkeypatch.setattr(tasks, "_installed", lambda name: None)


def test_humaneval_comes_from_its_wheel_where_that_is_installed() -> None:
    texts = list(tasks.task_texts("humaneval"))
    assert len(texts) == len(set(texts)) == 164
    assert all(text.startswith("Write a solution") and "\ndef " in text for text in texts)


@pytest.fixture
def serve_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], None]:
    def replace_fetch(rows: list[dict[str, Any]]) -> None:
        monkeypatch.setattr(tasks, "fetch", lambda task: rows)

    return replace_fetch


def texts(name: str, count: int) -> list[str]:
    """What the messages say that a server is asked."""
    asked: Any = load_asked(name, count)
    assert all(each == as_chat(each[0]["content"]) for each in asked)
    return [each[0]["content"] for each in asked]


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"cannot read gsm9k: .* gsm8k, "):
        load_asked("gsm9k", 1)


def test_the_choice_is_always_the_same(serve_rows: Callable[..., None]) -> None:
    rows = [{"question": str(i), "answer": ""} for i in range(100)]
    serve_rows(rows)
    first = texts("gsm8k", 10)
    assert first == texts("gsm8k", 20)[:10]
    assert first != [row["question"] + ASK for row in rows[:10]]


def test_token_ids_by_the_chat_template(
    serve_rows: Callable[..., None], built: Path, tmp_path: Path
) -> None:
    serve_rows([{"question": "1 + 1", "answer": ""}, {"question": "long " * 200, "answer": ""}])
    plain = load_task("gsm8k", built / "tokenizer", vocab_size=512, longest=120, count=4)
    assert len(plain) == 1  # the long one is left out
    for file in (built / "tokenizer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = "{{ '<think>' if enable_thinking is not false }}U {{ messages[0]['content'] }} A"
    (tmp_path / "chat_template.jinja").write_text(template)
    (chat,) = load_task("gsm8k", tmp_path, vocab_size=512, longest=130, count=4)
    assert len(plain[0]) < len(chat) < len(plain[0]) + 8
    assert chat[-len(plain[0]) :] != plain[0]
    file = tmp_path / "chats.jsonl"  # messages in a file are asked as a task's
    lines = [json.dumps({"messages": each}) for each in load_asked("gsm8k", 2)]
    file.write_text("\n".join(lines))
    asked = load_task(str(file), tmp_path, vocab_size=512, longest=999, count=2)
    assert len(asked) == 2
    assert chat in asked
    with pytest.raises(RequestError, match="every prompt of gsm8k is longer than 3 tokens"):
        load_task("gsm8k", tmp_path, vocab_size=512, longest=3, count=4)


def test_a_benchmark_of_a_task(serve_rows: Callable[..., None], built: Path) -> None:
    serve_rows([ROWS["humaneval"][0]] * 2)
    options = ("--prompts", "humaneval", "--max-tokens", "8", "--repeats", "1", "--json")
    told = run("bench", "engine", built, *options)
    assert told.code == 0, told.err
    cells = json.loads(told.out)["cells"]
    assert {(cell["task"], cell["samples"][0]["tokens"]) for cell in cells} == {("humaneval", 16)}
    assert "license: mit" in told.err


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` with an empty cache of its own, and without a network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ROWS)
def test_a_dataset_as_the_library_reads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, (row, prompt) = TASKS[name], ROWS[name]
    card = "configs:\n"
    for config, told in ((task.config or "default", row), ("another", {"x": 1})):
        file = f"{config}/{task.split}-00000-of-00001.parquet"
        Dataset.from_list([told]).to_parquet(tmp_path / file)
        card += f"- config_name: {config}\n  data_files:\n  - split: {task.split}\n"
        card += f"    path: {config}/{task.split}-*\n"
        card += "  default: true\n" * (told is row)
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    monkeypatch.setitem(TASKS, name, replace(task, hub=str(tmp_path)))
    assert texts(name, 3) == [prompt]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["gsm8k", "mbpp"])
def test_without_a_network_it_is_a_sentence(name: str) -> None:
    with pytest.raises(RequestError, match=f"cannot load the prompts of {name} from https") as e:
        load_asked(name, 1)
    assert "\n" not in str(e.value)
    assert "ffline" in e.value.problem
    assert e.value.fix.startswith("Check the network")


def test_without_the_library_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(task: Task) -> Any:
        raise ModuleNotFoundError("No module named 'datasets'")

    monkeypatch.setattr(tasks, "fetch", missing)
    with pytest.raises(RequestError, match="need the package datasets"):
        load_asked("mbpp", 1)
