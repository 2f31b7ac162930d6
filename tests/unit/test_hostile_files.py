"""Files that are wrong in kind, type or depth: a sentence of ours each time."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import copy_tokenizer, load_drafter, load_target, load_tokenizer
from dflash_trt.config import load_config
from dflash_trt.config.build import Speculation
from dflash_trt.engines.info import read_info
from dflash_trt.errors import BuildError, CheckpointError, DflashError, EngineError, RequestError
from dflash_trt.prompts import read_prompts
from dflash_trt.weights import read_json
from dflash_trt.wire import Settings
from tests.support.builds import config_of, quiet
from tests.support.commands import run

DEEP = "[" * 100_000
NESTED = '{"a": ' * 200 + "1" + "}" * 200


def make_special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 40)  # a hole: it takes no room on the disk
    else:
        path.write_text({"deep": DEEP, "nested": NESTED}[kind])


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "build": ("pair.yaml", lambda pair: load_config(pair / "pair.yaml")),
    "config": ("target/config.json", lambda pair: load_target(pair / "target")),
    "drafter": ("drafter/config.json", lambda pair: load_drafter(pair / "drafter")),
    "engine": (
        "built/engines/target/engine.json",
        lambda pair: read_info(pair / "built/engines/target"),
    ),
    "prompts": (
        "prompts",
        lambda pair: read_prompts(pair / "prompts", lambda _: [1], vocab_size=9, longest=9),
    ),
    "index": (
        "target/model.safetensors.index.json",
        lambda pair: read_json(pair / "target/model.safetensors.index.json"),
    ),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "deep", "nested"])
@pytest.mark.parametrize("reader", READERS)
def test_whatever_a_file_is_the_answer_is_a_sentence(pair: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    make_special(pair / name, kind)
    with pytest.raises(DflashError) as caught:
        read(pair)
    assert name.rsplit("/", 1)[-1] in str(caught.value)


@pytest.mark.parametrize("change", [{"slots": "4"}, {"slots": 0}, {"caches": [[1]]}, {"more": 1}])
def test_types_in_engine_json_are_checked(pair: Path, change: dict[str, Any]) -> None:
    file = pair / "built" / "engines" / "target" / "engine.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(EngineError, match=next(iter(change))):
        read_info(file.parent)


@pytest.mark.parametrize(
    "change",
    [
        *({"slots": "x"}, {"slots": "0"}, {"slots": None}, {"eos_token_ids": "1 a"}),
        *({"mode": "m"}, {"speculation": "[]"}, {"speculation": DEEP}, {"max_queue": "-1"}),
        {"max_per_client": "-1"},
    ],
)
def test_wrong_parameters_of_the_model_are_a_sentence(change: dict[str, str | None]) -> None:
    sizes = {"slots": 4, "max_queue": 64, "max_seq_len": 100, "prefill_chunk": 16, "block_size": 8}
    ends, names = frozenset({1}), {"tokenizer": "t", "engines": "e", "mode": "in_process"}
    sound = Settings(eos_token_ids=ends, speculation=Speculation(), **names, **sizes)
    parameters = {k: v for k, v in {**sound.to_parameters(), **change}.items() if v is not None}
    with pytest.raises(BuildError, match=r"config\.pbtxt of model dflash"):
        Settings.from_parameters(parameters)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('{"messages": [{"role": "user", "content": "\\ud800"}]}')
    with pytest.raises(RequestError, match=r"prompts:1: .* surrogates not allowed"):
        read_prompts(tmp_path / "prompts", lambda _: [1], vocab_size=9, longest=9)


@pytest.mark.parametrize("ends", [[1, True], True, [1.0], "12", {"1": 1}])
def test_ends_are_whole_numbers(pair: Path, ends: object) -> None:
    (pair / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(CheckpointError, match=r"eos_token_id .* is not a token"):
        load_target(pair / "target")


def test_a_panic_of_the_tokenizer_is_an_error_of_ours(pair: Path) -> None:
    file = pair / "target" / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"] |= {"continuing_subword_prefix": "long", "type": "BPE"}
    values["model"] |= {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    file.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        load_tokenizer(pair / "target")


def test_no_prompt_is_cut_or_filled_up(pair: Path) -> None:
    tokenizer = load_tokenizer(pair / "target")
    expected = tokenizer.encode("def f(): return 1").ids
    for stride in (1, 9):  # the larger one is a panic of the library
        file = pair / "target" / "tokenizer.json"
        values = json.loads(file.read_text())
        cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": stride}
        fill = {"pad_id": 0, "pad_type_id": 0, "pad_token": "x", "pad_to_multiple_of": None}
        fill |= {"strategy": {"Fixed": 99}, "direction": "Right"}
        file.write_text(json.dumps(values | {"truncation": cut, "padding": fill}))
        assert load_tokenizer(pair / "target").encode("def f(): return 1").ids == expected


def test_no_link_out_of_the_checkpoint_is_copied(pair: Path) -> None:
    secret = pair / "secret"
    secret.write_text("{}")
    secret.chmod(0o600)
    link = pair / "target" / "added_tokens.json"
    link.symlink_to(secret)
    for kind in ("onnxruntime", "tensorrt_llm"):
        with pytest.raises(CheckpointError, match=r"added_tokens\.json is a link out of"):
            build(config_of(pair, engine={"kind": kind}), pair / "new", quiet)
    code, _, err = run("inspect", pair / "target", pair / "drafter")
    assert (code, err) in ((1, ""), (0, ""))
    # a file of its own stays as private as it was
    link.unlink()
    secret.rename(link)
    build(config_of(pair), pair / "new", quiet)
    assert (pair / "new" / "tokenizer" / link.name).stat().st_mode & 0o777 == 0o600


def test_links_of_the_hubs_cache_are_followed(pair: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted((pair / "target").iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "alias").symlink_to(snapshot)
    for directory in (snapshot, tmp_path / "alias"):
        output = tmp_path / f"copy of {directory.name}"
        output.mkdir()
        copy_tokenizer(directory, output)
        assert (output / "tokenizer" / "tokenizer.json").is_file()
        assert not (output / "tokenizer" / "tokenizer.json").is_symlink()
