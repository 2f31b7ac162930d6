"""Command lines of README.md and docs/, read from the pages: all are parsed, cheap ones run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dflash_trt.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`dflash-trt (\S[^`]*)`")
CALL = re.compile(r"(?:^|[\s`])dflash-trt ([a-z-].*)")
# what runs in seconds, without a network, a server or a GPU
CHEAP = ("build build_configs/pycode.yaml", "plan build_configs/pycode.yaml", "bench published")


def commands(text: str) -> tuple[list[str], list[str]]:
    """What follows `dflash-trt` in blocks of commands, and within a line of text."""
    blocks = "\n".join(FENCE.findall(text)).replace("\\\n", " ")
    whole = [found[1] for line in blocks.splitlines() if (found := CALL.search(line))]
    return whole, INLINE.findall(FENCE.sub("", text))


def parse(line: str, *, whole: bool) -> None:
    """Raises what the command line would say; not whole: arguments may be left out."""
    command, words = typer.main.get_command(app), shlex.split(line, comments=True)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    assert not (words and hasattr(command, "commands")), f"{line}: no command {words[0]}"
    try:
        command.make_context("dflash-trt", words)
    except Exception as error:
        if whole or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
            raise AssertionError(f"{line}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_the_command_lines(page: Path) -> None:
    whole, mentioned = commands(page.read_text(encoding="utf-8"))
    for line in whole:
        parse(line, whole=True)
    for line in mentioned:
        parse(line, whole=False)


def test_a_wrong_command_line_is_found() -> None:
    for line in ("build x --nope", "bild x", "bench engin x", "verify x --max-tokens none"):
        with pytest.raises(AssertionError):
            parse(line, whole=False)
    with pytest.raises(AssertionError):
        parse("build --tp 2", whole=True)


def test_every_option_is_on_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    root = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    leaves = {**root, **root["bench"].commands}
    missing = {
        f"{name} {option}"
        for name, command in leaves.items()
        for parameter in command.params
        for option in parameter.opts[:1]
        if option.startswith("--") and not re.search(rf"{option}(?![\w-])", pages)
    }
    assert not missing


def test_cheap_commands_run(tmp_path: Path) -> None:
    for name in ("build_configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    pages = [commands(page.read_text(encoding="utf-8")) for page in PAGES]
    lines = {line for page in pages for lines in page for line in lines if line.startswith(CHEAP)}
    assert all(any(line.startswith(cheap) for line in lines) for cheap in CHEAP)
    for line in sorted(lines):
        arguments = shlex.split(line, comments=True)
        done = subprocess.run(
            [sys.executable, "-m", "dflash_trt", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
