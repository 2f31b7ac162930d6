"""`build`: what it writes, that it repeats, that it is atomic, and what it refuses."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.builder.manifest import check_build, read_manifest
from dflash_trt.builder.opened import OpenedBuild, unserved
from dflash_trt.builder.pipeline import build
from dflash_trt.errors import BuildError, CheckpointError, ConfigError, PairError
from dflash_trt.files import sole_writer
from dflash_trt.weights.gguf import directory as gguf_directory
from tests.support.builds import assert_only, config_of, contents, quiet
from tests.support.pairs import make_pair

KINDS: dict[str, dict[str, Any]] = {
    "onnxruntime": {},
    "tensorrt_llm": {"engine": {"kind": "tensorrt_llm", "gpus": 4}},
}
both_kinds = pytest.mark.parametrize("kind", KINDS, indirect=True)


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "onnxruntime"))


@pytest.fixture(scope="module")
def original(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    make_pair(directory, tied=False, rope_theta=10000.0)
    build(config_of(directory, **KINDS[kind]), directory / "built", quiet)
    return directory


@both_kinds
def test_a_build_holds_what_its_manifest_says(original: Path, kind: str) -> None:
    built = original / "built"
    manifest, found = read_manifest(built), contents(built)
    found.pop("manifest.json")
    digest = hashlib.sha256((built / "manifest.json").read_bytes()).hexdigest()
    for name in found:
        if name.startswith("deploy/"):  # these hold the manifest's own digest
            found[name] = found[name].replace(digest.encode(), b"0" * 64)
            found[name] = found[name].replace(digest[:12].encode(), b"0" * 12)
    assert manifest["files"] == {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for name, data in found.items()
    }
    assert "model_repository/dflash/config.pbtxt" in found
    tokenizer = "tokenizer/tokenizer.json"
    assert found[tokenizer] == (original / "target" / "tokenizer.json").read_bytes()
    for name, data in contents(built).items():
        assert str(original).encode() not in data, f"{name} holds a path of this machine"
    if kind == "tensorrt_llm":  # it stands alone
        for role in ("target", "drafter"):
            for file in (original / role).iterdir():
                assert found[f"engines/tensorrt_llm/{role}/{file.name}"] == file.read_bytes()
        return
    for role in ("target", "drafter"):
        assert f"engines/{role}/engine.json" in found
        for name in ("config.json", "model.safetensors"):
            digest = hashlib.sha256((original / role / name).read_bytes()).hexdigest()
            assert manifest["inputs"][role][name]["sha256"] == digest
    assert manifest["config"]["serving"]["max_seq_len"] == 512  # the target's own


@both_kinds
def test_the_same_inputs_give_the_same_bytes_anywhere(
    original: Path, pair: Path, kind: str
) -> None:
    build(config_of(pair, **KINDS[kind]), pair / "elsewhere" / "deep", quiet)
    assert contents(pair / "elsewhere" / "deep") == contents(original / "built")


def test_a_second_build_has_nothing_to_do(pair: Path) -> None:
    before = (pair / "built" / "manifest.json").stat()
    result = build(config_of(pair), pair / "built", quiet)
    assert not result.built
    assert result.manifest == read_manifest(pair / "built")
    after = (pair / "built" / "manifest.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_compiled_code_has_no_place(pair: Path) -> None:
    """Python would run it in place of the model that the manifest names."""
    cache = pair / "built" / "model_repository" / "dflash" / "1" / "__pycache__"
    assert cache.read_bytes() == b""
    cache.unlink()
    cache.mkdir()
    (cache / "model.cpython-311.pyc").write_bytes(b"x")
    with pytest.raises(BuildError, match=r"__pycache__/model.cpython-311.pyc \(added\)"):
        check_build(pair / "built")
    assert build(config_of(pair), pair / "built", quiet).built


@both_kinds
@pytest.mark.parametrize("change", ["config", "input", "missing file", "cut file", "extra file"])
def test_any_change_is_built_again(original: Path, pair: Path, kind: str, change: str) -> None:
    built, settings = pair / "built", config_of(pair, **KINDS[kind])
    weights = {
        "onnxruntime": built / "engines" / "drafter" / "model.onnx",
        "tensorrt_llm": built / "engines" / "tensorrt_llm" / "target" / "model.safetensors",
    }[kind]
    if change == "config":
        settings = config_of(pair, **KINDS[kind], speculation={"draft_tokens": 3})
    elif change == "input":
        file = pair / "target" / "generation_config.json"
        file.write_text(file.read_text() + "\n")
    elif change == "missing file":
        weights.unlink()
    elif change == "cut file":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        (built / "engines" / "left-over").write_bytes(b"x")
    assert build(settings, built, quiet).built
    assert not build(settings, built, quiet).built
    if "file" in change:
        assert contents(built) == contents(original / "built")
    assert_only(pair, "built")


def test_an_output_that_is_not_ours_is_left_alone(pair: Path) -> None:
    notes = pair / "notes"
    notes.mkdir()
    assert build(config_of(pair), notes, quiet).built  # an empty folder is fine
    shutil.rmtree(notes)
    notes.mkdir()
    (notes / "todo.txt").write_text("x")
    foreign = pair / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "a web app"}')
    file = pair / "file"
    file.write_text("x")
    for output in (notes, foreign, file, pair / "target"):
        before = contents(output) if output.is_dir() else output.read_bytes()
        with pytest.raises(BuildError, match="not a"):
            build(config_of(pair), output, quiet)
        assert (contents(output) if output.is_dir() else output.read_bytes()) == before
    assert_only(pair, "built", "notes", "foreign", "file")


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("onnxruntime", "dflash_trt.builder.engines.build_drafter"),
        ("onnxruntime", "dflash_trt.builder.onnxruntime.write_repository"),
        ("onnxruntime", "os.fsync"),
        ("tensorrt_llm", "dflash_trt.builder.tensorrt_llm.write_llm_repository"),
    ],
    ids=["engine", "repository", "disk", "bundle"],
    indirect=["kind"],
)
def test_a_failed_build_keeps_the_old_one(
    pair: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "model.onnx.data")

    monkeypatch.setattr(stage, fail)
    before = contents(pair / "built")
    changed = config_of(pair, **KINDS[kind], speculation={"draft_tokens": 3})
    for output in ("built", "new"):
        with pytest.raises(BuildError, match="No space left on device"):
            build(changed, pair / output, quiet)
    assert contents(pair / "built") == before
    assert_only(pair, "built")


BUILD_AND_HANG = """
import sys, time
from pathlib import Path
from typing import Any
import dflash_trt.builder.pipeline, dflash_trt.builder.onnxruntime
from dflash_trt.config import BuildConfig
def hang(*_):
    print("midway", flush=True)
    time.sleep(60)
dflash_trt.builder.onnxruntime.write_repository = hang
pair = Path(sys.argv[1])
paths = {role: {"path": pair / role} for role in ("target", "drafter")}
config = BuildConfig.model_validate({"name": "tiny", **paths})
dflash_trt.builder.pipeline.build(config, Path(sys.argv[2]), lambda *_: None)
"""


def hanging_build(pair: Path, output: Path) -> "subprocess.Popen[str]":
    """Return a build in another process, stopped after both engines are written."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD_AND_HANG, str(pair), str(output)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "midway\n"
    return process


def test_a_killed_build_looks_unfinished_and_the_next_one_works(pair: Path) -> None:
    output = pair / "killed"
    with hanging_build(pair, output) as process:
        process.send_signal(signal.SIGKILL)
    left = [path.name for path in pair.iterdir() if "killed" in path.name]
    assert left
    assert all(name.startswith(".") for name in left)
    assert not list(pair.glob(".*/manifest.json"))
    with pytest.raises(BuildError, match="not a directory that dflash-trt built"):
        read_manifest(output)
    assert build(config_of(pair), output, quiet).built
    assert contents(output) == contents(pair / "built")
    assert_only(pair, "built", "killed")


def test_a_second_builder_is_told_of_the_first(pair: Path) -> None:
    output = pair / "shared"
    with hanging_build(pair, output) as process:
        with pytest.raises(BuildError, match=r"another build of .* is running"):
            build(config_of(pair), output, quiet)
        assert process.poll() is None  # nor did it wait for it
        assert build(config_of(pair), pair / "other", quiet).built  # another output is free
        process.send_signal(signal.SIGKILL)
    assert build(config_of(pair), output, quiet).built


def test_a_build_killed_between_the_renames_gives_the_old_one_back(pair: Path) -> None:
    output = pair / "built"
    before = contents(output)
    output.rename(pair / ".built.dflash-trt-replaced")
    (pair / ".built.dflash-trt-building").mkdir()
    with sole_writer(output):
        assert contents(output) == before
    assert_only(pair, "built")


@pytest.mark.parametrize("length", [8, 513])
def test_max_seq_len_fits_the_pair(pair: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=r"9 to 512"):
        build(config_of(pair, serving={"max_seq_len": length}), pair / "new", quiet)
    assert_only(pair, "built")


def test_a_wrong_pair_writes_nothing(pair: Path) -> None:
    with pytest.raises(PairError, match="draft_tokens is 8"):
        build(config_of(pair, speculation={"draft_tokens": 8}), pair / "a" / "new", quiet)
    (pair / "target" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        build(config_of(pair), pair / "a" / "new", quiet)
    assert_only(pair, "built")


def test_a_build_that_a_server_has_open_is_not_replaced(pair: Path) -> None:
    built = pair / "built"
    other = config_of(pair, serving={"max_seq_len": 48})
    opened = OpenedBuild(built)
    assert not build(config_of(pair), built, quiet).built  # the same again changes nothing
    with pytest.raises(BuildError, match=f"a server runs from {built}"):
        build(other, built, quiet)
    opened.check_unchanged()
    opened.close()
    assert build(other, built, quiet).built


def test_a_build_that_is_being_replaced_is_not_opened(pair: Path) -> None:
    with (
        unserved(pair / "built"),
        pytest.raises(BuildError, match="is being replaced"),
    ):
        OpenedBuild(pair / "built")
    OpenedBuild(pair / "built").close()


def test_an_opened_build_may_be_written_again_but_not_changed(pair: Path) -> None:
    built = pair / "built"
    shutil.copytree(built, pair / "copy")
    opened = OpenedBuild(built)
    tokenizer = built / "tokenizer" / "tokenizer.json"
    text = tokenizer.read_bytes()
    tokenizer.write_bytes(text)
    opened.check_unchanged()
    tokenizer.write_bytes(text + b" ")
    with pytest.raises(BuildError, match=r"changed after .*: tokenizer/tokenizer.json \(changed\)"):
        opened.check_unchanged()
    tokenizer.unlink()
    with pytest.raises(BuildError, match=r"tokenizer.json \(missing\)"):
        opened.check_unchanged()
    tokenizer.write_bytes(text)
    (built / "engines" / "more").touch()
    with pytest.raises(BuildError, match=r"engines/more \(added\)"):
        opened.check_unchanged()
    (built / "engines" / "more").unlink()
    opened.check_unchanged()
    built.rename(pair / "aside")
    (pair / "copy").rename(built)
    opened.check_unchanged()
    manifest = built / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(BuildError, match="it is another build"):
        opened.check_unchanged()
    opened.close()


def test_a_terminated_build_leaves_nothing(pair: Path, tmp_path: Path) -> None:
    """SIGTERM at the first engine; a GGUF file's directory of a killed build goes with the next."""
    command = """
import os, signal, sys
import dflash_trt.builder.onnxruntime as module
def stop(*_): os.kill(os.getpid(), signal.SIGTERM)
module._write = stop
from dflash_trt.cli.main import main
sys.exit(main())
"""
    config = pair / "config.yaml"
    paths = "\n".join(f"{role}: {{path: {pair / role}}}" for role in ("target", "drafter"))
    config.write_text(f"name: tiny\n{paths}\n")
    output = tmp_path / "out" / "built"
    done = subprocess.run(
        [sys.executable, "-c", command, "build", str(config), "--output", str(output)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "stopped by SIGTERM" in done.stderr) == (143, True), done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_process_left_of_a_gguf_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_directory, "gettempdir", lambda: str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = tmp_path / f"dflash-trt-gguf-{ended.pid}-x"
    running = tmp_path / f"dflash-trt-gguf-{os.getpid()}-x"
    others = tmp_path / "dflash-trt-gguf-notes"
    for directory in (gone, running, others):
        (directory / "model").mkdir(parents=True)
    gguf_directory._remove_leftovers()
    assert sorted(tmp_path.iterdir()) == sorted([running, others])
