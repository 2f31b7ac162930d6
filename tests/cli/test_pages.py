"""The pages' blocks: each has a runner or stands in a list; configs and queries are read.

`test_walks.py` runs commands and snippets.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dflash_trt.cli.main import GROUPS, app
from dflash_trt.config import load_config
from tests.serving.test_metrics import _check_query
from tests.support.commands import run
from tests.support.pages import FENCE, NOT_RUN, PAGES, ROOT, Block, not_run, read, unfinished


def test_every_block_is_run_or_listed() -> None:
    """A language without a runner has to be listed."""
    blocks = [block for page in PAGES for block in read(page)]
    run = {"sh", "python", "command", "yaml", "setting", "promql", "console"}
    assert not [block for block in blocks if block.language not in run and not not_run(block)]
    assert {not_run(block) for block in blocks} - {None} == NOT_RUN.keys()  # none is stale
    assert {"sh", "python", "yaml", "promql", "console"} <= {block.language for block in blocks}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_is_understood(page: str) -> None:
    """Commands inside Docker's or Slurm's lines, and those that no test runs, count too."""
    for block in read(page):
        if block.language in ("sh", "command"):
            for line in re.findall(r"^[^#\n]*?\bdflash-trt ([^#\n]*)", block.text, re.MULTILINE):
                line = re.split(r" (?:\d?>|[&|;])", line)[0].rstrip()
                for quote in "'\"":
                    if line.count(quote) % 2:  # it is an argument itself, and ends there
                        line = line.rpartition(quote)[0]
                words = shlex.split(line)
                if words and words[0].islower():
                    unfinished(words)


def test_help_lists_whole_sentences_by_group_and_each_command_has_an_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("--help").out
    root = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert re.findall(r"^╭─ (\w+) ─", text, re.MULTILINE) == ["Options", *GROUPS]
    listed = re.findall(r"^│ ([a-z-]+) ", text, re.MULTILINE)
    assert sorted(name for name in listed if name in root) == sorted(root)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    for name, command in {**root, **root["bench"].commands}.items():
        example = command.epilog.removeprefix("Example: dflash-trt ").partition(" >")[0]
        assert name in example.split()[:2]
        assert not unfinished(shlex.split(example))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_every_link_leads_to_a_page_and_a_heading(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_the_pairs_that_build_refuses_are_named() -> None:
    page = (ROOT / "docs/dgx-b300.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| \d \|.*\| ?(.*) \|$", page, re.MULTILINE)
    configs = {file.stem: file.read_text() for file in (ROOT / "build_configs/dgx-b300").iterdir()}
    assert {name for name, _ in rows} == configs.keys()
    refused = {name for name, text in configs.items() if text.startswith("# Refused by build: ")}
    assert {name for name, reason in rows if reason} == refused


def of(*languages: str) -> list[Any]:
    blocks = [block for page in PAGES for block in read(page) if block.language in languages]
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in blocks]


@pytest.mark.parametrize("block", of("yaml", "setting"))
def test_the_config_reads_it(block: Block, tmp_path: Path) -> None:
    """Settings written `a.b: c` are a path and a value."""
    found = yaml.safe_load(block.text)
    if "scrape_configs" in found:  # Prometheus's own
        known = {"job_name", "scrape_interval", "static_configs"}
        assert found["scrape_configs"][0].keys() == known
        assert all((ROOT / file).is_file() for file in found["rule_files"])
        return
    if block.language == "setting":
        ((path, value),) = found.items()
        for name in reversed(path.split(".")):
            value = {name: value}
        found = value
    names = ("engines", "models", "quickstart", "serving", "speculation")
    ours = block.page in [f"docs/{name}.md" for name in names]
    engine = {"kind": "onnxruntime" if ours else "tensorrt_llm"} | found.pop("engine", {})
    hub = {"hub": "org/name", "revision": "0" * 40}  # `checkpoints: hub` takes no path
    config = {"name": "x", "target": hub, "drafter": hub, "engine": engine} | found
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    load_config(tmp_path / "config.yaml")


def test_the_smallest_config_is_the_file() -> None:
    (shown,) = (block.text for block in read("docs/quickstart.md") if block.language == "yaml")
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "build_configs/pycode.yaml").read_text())


@pytest.mark.parametrize("block", of("promql"))
def test_the_queries_are_of_what_is_exported(block: Block) -> None:
    for line in block.text.splitlines():
        _check_query(re.split(r"\s{2,}", line, maxsplit=1)[1])


def named(text: str) -> list[Path]:
    package, roots = ROOT / "dflash_trt", ("tests", "scripts", "model_repository", "build_configs")
    names = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|yaml))`", text)
    return [package / name for name in re.findall(r"`(\w+\.py)`", text)] + [
        (ROOT if name.startswith(roots) else package) / name for name in dict.fromkeys(names)
    ]


def test_structure_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert named(text)
    assert not [str(file) for file in named(text) if not file.is_file()]
    functions = [
        (file, name)
        for names in re.findall(r"`[\w/]+\.py` (?:`\w+`(?:, | and )?)+", " ".join(text.split()))
        for file in re.findall(r"`([\w/]+\.py)`", names)
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert functions
    for file, name in functions:
        (path,) = named(f"`{file}`")
        source = path.read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {name}\b", source), f"{file} has no {name}"
    core = named(text.partition("## Read these 16 files")[2].partition("## The rooms")[0])
    assert len(core) == 16
