"""Every byte of a build is held against its manifest, and a manifest that is no more is told."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.builder import manifest
from dflash_trt.builder.manifest import Differences, check_build, differences, read_manifest
from dflash_trt.errors import BuildError
from tests.support.commands import run


@pytest.fixture
def built(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original / "built", tmp_path / "built", symlinks=True))


def flip(file: Path) -> None:
    """Flip one bit in the middle; the modification time stays."""
    data, before = bytearray(file.read_bytes()), file.stat()
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_one_bit_anywhere_is_found(built: Path) -> None:
    listed = read_manifest(built)
    for name in (name for name, each in listed["files"].items() if each["size"]):
        flip(built / name)
        assert differences(built, listed) == Differences([name], [], [])
        flip(built / name)
    assert not differences(built, listed)


def test_every_command_refuses_a_changed_build(built: Path) -> None:
    name = "engines/target/model.onnx.data"
    flip(built / name)
    prompts = built.parent / "prompts.jsonl"
    prompts.write_text('{"text": "a"}\n')
    for command in (["doctor"], ["serve"], ["verify", "--prompts", prompts, "--max-tokens", 2]):
        code, _, err = run(command[0], built, *command[1:])
        assert (code, len(err.splitlines())) == (1, 1)
        assert f"{name} (changed)" in err
    assert run("verify", built, *command[1:], "--check", "none")[0] in (0, 1)
    code, out, _ = run("check", built)
    assert (code, out) == (1, f"changed: {name}\n")
    code, out, _ = run("check", built, "--json")
    found = json.loads(out)
    assert (code, found["intact"], found["changed"]) == (1, False, [name])


def test_check_names_every_file_that_differs(built: Path) -> None:
    assert run("check", built)[0] == 0
    (built / "tokenizer" / "tokenizer.json").unlink()
    (built / "engines" / "more\n\udcff").write_bytes(b"")
    (built / "elsewhere").symlink_to("/")
    (built / "engines" / "target" / "engine.json").unlink()
    os.mkfifo(built / "engines" / "target" / "engine.json")
    code, out, _ = run("check", built)
    assert code == 1
    assert out.splitlines() == [
        "changed: engines/target/engine.json",
        "missing: tokenizer/tokenizer.json",
        "added: elsewhere",
        "added: engines/more\\u000a\\udcff",
    ]


def test_each_depth_of_a_check_reads_as_much_as_it_says(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """quick checks only the size of large files; unset depends on the size of the build."""
    monkeypatch.setattr(manifest, "LARGE", 10_000)
    flip(built / "engines" / "target" / "model.onnx.data")  # larger than that
    check_build(built, "none")
    check_build(built, "quick")
    for depth in ("full", None):
        with pytest.raises(BuildError, match=r"model\.onnx\.data \(changed\)"):
            check_build(built, depth)
    monkeypatch.setattr(manifest, "MAX_HASHED", 10_000)
    check_build(built)
    flip(built / "engines" / "target" / "engine.json")
    with pytest.raises(BuildError, match=r"engine\.json \(changed\)"):
        check_build(built)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"files": []}, "files"),
        ({"config": {"engine": {"kind": 1}, "serving": {}, "speculation": {}}}, "config.engine"),
        ({"target": {}}, "target.vocab_size"),
        ({"hub": {"target": []}}, "hub.target"),
    ],
)
def test_a_damaged_manifest_is_a_sentence(built: Path, change: Any, where: str) -> None:
    file = built / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(BuildError, match=f"is damaged \\({where}"):
        read_manifest(built)


def test_a_manifest_as_a_pipe_or_deep_is_none(built: Path) -> None:
    file = built / "manifest.json"
    file.write_text("[" * random.Random(0).randrange(10_000, 100_000))
    with pytest.raises(BuildError, match="not a directory that dflash-trt built"):
        read_manifest(built)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BuildError, match="not a directory that dflash-trt built"):
        read_manifest(built)
