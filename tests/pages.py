"""README.md, docs/ and the examples' READMEs: what a reader would type, and how it is run.

A page becomes one bash script, from top to bottom: its `sh` blocks, its `python` blocks and the
commands within its sentences. Ports and the capitals that stand for a reader's own names are put
in; all else is as it is on the page.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    str(page.relative_to(ROOT))
    for page in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    )
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
PROGRAMS = (
    *("aiperf", "curl", "dflash-trt", "docker", "git", "hf", "kubectl", "make", "mpirun"),
    *("nvidia-smi", "openssl", "pip", "promtool", "pytest", "python", "python3", "rsync", "scp"),
    *("sha256sum", "srun", "ssh", "systemctl", "umask"),
)
SETTING = re.compile(r"(engine|serving|speculation|target|drafter)(\.\w+)*: ")
PRELUDE = """
set -eE -o pipefail
shopt -s expand_aliases
trap 'echo "$at: $BASH_COMMAND" >&2' ERR
"""


@dataclass(frozen=True)
class Block:
    """What a page shows as code; `language` is a fence's, or `command` or `setting` of a line."""

    page: str
    line: int
    language: str
    text: str

    def starts(self, beginning: str) -> bool:
        return self.text.startswith(beginning)


def read(page: str) -> list[Block]:
    """The blocks of a page, from top to bottom; code in a sentence that is neither is left out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(each.start(), each[1], each[2]) for each in FENCE.finditer(text)]
    for each in INLINE.finditer(FENCE.sub(lambda fence: " " * len(fence[0]), text)):
        code = " ".join(each[1].split())
        if code.split()[0] in PROGRAMS and " " in code:
            found.append((each.start(), "command", code))
        elif SETTING.match(code):
            found.append((each.start(), "setting", code))
    lines = [(text.count("\n", 0, at) + 1, *rest) for at, *rest in sorted(found)]
    return [Block(page, *each) for each in lines]


def script(blocks: list[Block], names: dict[str, str]) -> str:
    """What bash runs; names: whole words to put in, such as ports."""
    words = "|".join(map(re.escape, names))
    parts = [PRELUDE]
    for block in blocks:
        text = block.text.strip() + "\n"
        if names:
            text = re.sub(rf"(?<![\w.$])(?:{words})(?!\w)", lambda found: names[found[0]], text)
        if block.language == "python":
            text = f"python - <<'END_OF_SNIPPET'\n{text}END_OF_SNIPPET\n"
        else:
            text = text.replace(" && ", "\n")  # bash forgives what fails before the last of them
        parts.append(f"at={block.page}:{block.line}\n{text}")
    return "\n".join(parts)


def walk(
    blocks: list[Block], names: dict[str, str], directory: Path, environment: dict[str, str]
) -> str:
    """Run the blocks one after the other in `directory`: what they print; fails as one of them."""
    file = directory.parent / f"{directory.name}.sh"
    file.write_text(script(blocks, names))
    done = subprocess.run(
        ["bash", file],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
