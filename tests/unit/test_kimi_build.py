"""The bundle of a Kimi pair with the real ranks: killed, repeated, and of damaged files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.config import load_config
from dflash_trt.errors import DflashError
from tests.support.builds import quiet
from tests.support.published import PAIRS, write_pair

pytestmark = pytest.mark.models

CONFIG = Path(__file__).parents[2] / "build_configs" / "dgx-b300" / "kimi-k2.5.yaml"
KILLS = (4.0, 8.0, 12.0)  # seconds after the start
LIMIT = 300  # seconds of a build


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub")
    config = load_config(CONFIG)
    sources = (config.target, *config.drafters.values())
    revisions = {str(source.hub): str(source.revision) for source in sources}
    write_pair(directory, PAIRS["kimi-k2.5"], revisions)
    return directory


def command(output: Path) -> list[str]:
    return [sys.executable, "-m", "dflash_trt", "build", str(CONFIG), "--output", str(output)]


def contents(directory: Path) -> dict[str, bytes]:
    files = [file for file in directory.rglob("*") if file.is_file()]
    small = [file for file in files if file.suffix != ".safetensors"]
    return {str(file.relative_to(directory)): file.read_bytes() for file in small}


def test_a_killed_build_leaves_nothing_and_a_repeated_one_is_the_same(
    cache: Path, tmp_path: Path
) -> None:
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    killed = tmp_path / "killed"
    for seconds in KILLS:
        process = subprocess.Popen(command(killed), env=environment, start_new_session=True)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT)
        assert process.returncode == 0 or not killed.exists()
    for output in (killed, tmp_path / "other"):
        subprocess.run(command(output), env=environment, check=True, timeout=LIMIT)
    assert contents(killed) == contents(tmp_path / "other")
    settings = json.loads((killed / "tokenizer" / "tokenizer_config.json").read_text())
    assert "auto_map" not in settings
    assert not [name for name in contents(killed) if name.endswith(("tiktoken.model", "kimi.py"))]


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("tiktoken.model", b" 163583\n", b"", "no token in base64"),
        ("tiktoken.model", b" 99999\n", b" 99998\n", "rank 99998, which an earlier line has"),
        ("tokenization_kimi.py", b"pat_str = ", b"pat_str = pattern_of()\n    other = ", "pat_str"),
        ("tokenization_kimi.py", rb"{1,3}", rb"{1,3}+", "another pattern"),
        ("tokenizer_config.json", b'"163585"', b'"163584"', "163584 is there twice"),
    ],
)
def test_a_damaged_file_is_named(
    cache: Path, tmp_path: Path, name: str, old: bytes, new: bytes, problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    copy = tmp_path / "hub"
    shutil.copytree(cache, copy, symlinks=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(copy))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    [file] = copy.rglob(name)
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))
    with pytest.raises(DflashError, match=problem) as caught:
        build(load_config(CONFIG), tmp_path / "built", quiet)
    assert name in caught.value.problem
    assert not (tmp_path / "built").exists()
