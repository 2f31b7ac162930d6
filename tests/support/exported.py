"""Scripts of `dflash-trt export`: their options are published ones, and the shell agrees."""

import json
import shlex
from pathlib import Path

from tests.support.commands import program

PUBLISHED = json.loads((Path(__file__).parents[1] / "schemas" / "export_options.json").read_text())


def commands(script: str) -> list[list[str]]:
    lines = script.rsplit("\nEOF\n", maxsplit=1)[-1].replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words and words[0] not in ("set", "export")]


def options(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def assert_published(script: str, engine: str) -> list[str]:
    """Assert that the last command and its options are the engine's; return its words."""
    *fetched, words = commands(script)
    assert all(each[:2] == ["hf", "download"] for each in fetched), fetched
    published = PUBLISHED[engine]
    start = published["command"]
    assert words[: len(start)] == start
    assert set(options(words)) <= set(published["options"])
    return words


def assert_shell_agrees(scripts: dict[str, str], directory: Path) -> None:
    files = [directory / f"{name}.sh" for name in scripts]
    for file, script in zip(files, scripts.values(), strict=True):
        file.write_text(script)
    ran = program("shellcheck", *files)
    assert ran.returncode == 0, ran.stdout
