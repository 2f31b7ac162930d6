"""What a reader types of README.md, docs/ and the examples' READMEs, run as the page has it.

`dflash-trt`, Python, curl and openssl run against a real server of the demo pair. Blocks that call
anything else (Docker, a cluster, an index, GPUs) are read by `tests/cli/test_pages.py` alone.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.chat_pair import build_chat_pair
from tests.support.pages import PAGES, ROOT, Block, read, script, typed
from tests.support.servers import serve_ports, serving

pytestmark = pytest.mark.soak

OURS = (
    "dflash-trt",
    "curl",
    "python",
    "openssl",
    "umask",
    "sha256sum",
    "cat",
    "#",
    "-",
    "}",
    "'",
    "{",
    "END",
)
GPT_OSS = ROOT / "build_configs" / "dgx-b300" / "gpt-oss-120b.yaml"
OVER_LLM = {"docs/speculation.md", "docs/structure.md"}  # CONFIG is gpt-oss's
ELSEWHERE = ("serve ", "doctor", "build build_configs/dgx", "on_gpus", "bench ", ":8002", "PORT")
ELSEWHERE += ("export ", "llm_args_schema")  # of models on the Hub; of TensorRT-LLM
OPTIONS = (
    'case "$1" in verify) set -- "$@" --max-tokens 8 ;; generate) set -- "$@" --url "$GRPC" ;; esac'
)


def runs(block: Block) -> bool:
    """Return whether a block runs here: a server runs already, and a bundle's needs its GPUs."""
    if block.language == "python":
        return "openai" not in block.text or "8000" in block.text
    lines = [line.strip() for line in block.text.strip().splitlines() if line.strip()]
    return all(line.startswith(OURS) for line in lines) and not any(
        word in block.text for word in ELSEWHERE
    )


WALKED = {
    page: blocks for page in PAGES if (blocks := [each for each in typed(page) if runs(each)])
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """Set up where the reader types: what the pages assume, and substitutes for ports."""
    home = tmp_path_factory.mktemp("walks")
    built, folder = build_chat_pair(home), home / "reader"
    folder.mkdir()
    for each in ROOT.iterdir():
        if not each.name.startswith(".") and each.name != "build":
            (folder / each.name).symlink_to(each)
    pair = {"TARGET": home / "target", "DRAFTER": ROOT / "examples" / "pycode" / "drafter"}
    for name, path in (pair | {"BUILD": built, "DIR": built}).items():
        (folder / name).symlink_to(path)
    shutil.copytree(built, folder / "build" / "pycode")
    paths = {role.lower(): {"path": str(path)} for role, path in pair.items()}
    config = {"name": "x", "engine": {"kind": "onnxruntime"}} | paths
    (folder / "CONFIG").write_text(yaml.safe_dump(config))
    (folder / "PROMPT.txt").write_text("def main():\n")
    (folder / "FILE.jsonl").write_text('{"text": "def main():"}\n{"text": "class A:"}\n')
    programs = home / "bin"
    programs.mkdir()
    run = f'exec "{sys.executable}" -m dflash_trt "$@"'
    (programs / "dflash-trt").write_text(f"#!/usr/bin/env bash\n{OPTIONS}\n{run}\n")
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    curl = shutil.which("curl")
    (programs / "curl").write_text(f'#!/bin/sh\nexec {curl} --fail-with-body "$@"\n')
    for each in programs.iterdir():
        each.chmod(0o755)
    ports = serve_ports()
    with serving(built, ports):
        yield folder, {"8000": str(ports.http), "8001": str(ports.grpc)}


@pytest.mark.parametrize("page", WALKED)
def test_a_page_is_walked(page: str, reader: tuple[Path, dict[str, str]]) -> None:
    folder, names = reader
    if page in OVER_LLM:
        names = names | {"CONFIG": str(GPT_OSS)}
    names = names | {"[DRAFTER]": "DRAFTER"}
    path = os.pathsep.join([str(folder.parent / "bin"), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script(WALKED[page], names)],
        cwd=folder,
        env=os.environ
        | {"PATH": path, "PYTHONPATH": str(ROOT), "GRPC": f"127.0.0.1:{names['8001']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_the_demo_prints_what_the_page_shows() -> None:
    """Only its figures differ, and so the width of its table."""
    blocks = read("README.md")
    at = next(i for i, block in enumerate(blocks) if block.language == "console")
    command = blocks[at - 1].text.split()
    assert command[:2] == ["python", "examples/demo.py"]
    shutil.rmtree(ROOT / "build" / command[2], ignore_errors=True)  # else there is nothing to build
    done = subprocess.run(
        [sys.executable, "-u", *command[1:]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout

    def shape(text: str) -> list[str]:
        built = text[text.index("$ dflash-trt") :]  # pip may have had to fetch the model before
        lines = [line for line in built.splitlines() if line and not line.endswith(" ...")]
        return [re.sub(r"[\s━─]+", " ", re.sub(r"\d[\d.]*", "#", line)) for line in lines]

    assert shape(done.stdout) == shape(blocks[at].text)
