"""The files of a checkpoint directory: tokenizer, model card."""

import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tokenizers import Tokenizer

from dflash_trt.checkpoints.tiktoken_files import (
    RANKS,
    SETTINGS,
    byte_level_alphabet,
    code_file,
    convert,
    has_ranks,
    read_split,
    settings_of_converted,
)
from dflash_trt.errors import CheckpointError, panics_as_errors
from dflash_trt.files import compose_yaml, copy_file, parse_yaml, read_text
from dflash_trt.weights.json_file import read_bytes, read_json

MAX_TOKENIZER = 1 << 26  # bytes; the largest published one has about 40 MB
REQUIRED = "tokenizer.json"
MORE_TEMPLATES = "additional_chat_templates/*.jinja"  # named templates, as in transformers
OPTIONAL = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
CARD = "README.md"
Spell = Callable[[int], bytes]  # by token id


def check_inside(directory: Path, file: Path) -> None:
    """Raise CheckpointError if a file links outside its checkpoint: builds copy its bytes."""
    home = directory.resolve()
    real = file.resolve()
    within = [home]
    if home.parent.name == "snapshots":  # in the Hub's cache COMMIT links to blobs
        within.append(home.parents[1] / "blobs")
    if not any(real.is_relative_to(folder) for folder in within):
        raise CheckpointError(
            f"{file} is a link out of the checkpoint, to {real}", "Put the file itself there"
        )


def has_tokenizer(directory: Path) -> bool:
    """Return whether there is a tokenizer.json, or what one can be made of."""
    return (directory / REQUIRED).is_file() or has_ranks(directory)


def is_converted(directory: Path) -> bool:
    """Return whether the tokenizer is made of tiktoken.model."""
    return has_ranks(directory) and not (directory / REQUIRED).is_file()


def tokenizer_files(directory: Path) -> list[Path]:
    """Return what exists, sorted; CheckpointError without a tokenizer or for a link outside.

    Of the Python file beside tiktoken.model only a pattern is read: `tokenizer_split` returns it.
    """
    if not has_tokenizer(directory):
        raise _no_tokenizer(directory)
    tokenizer = REQUIRED
    if is_converted(directory):
        tokenizer = RANKS
        check_inside(directory, code_file(directory))
    named = [directory / name for name in (tokenizer, *OPTIONAL)]
    files = [*named, *directory.glob(MORE_TEMPLATES)]
    files = sorted(file for file in files if file.is_file())
    for file in files:
        check_inside(directory, file)
    return files


def tokenizer_split(directory: Path) -> dict[str, Any]:
    """Return what the build takes of a tokenizer's Python file, to be recorded; {} without one."""
    return read_split(directory)._asdict() if is_converted(directory) else {}


def _no_tokenizer(directory: Path) -> CheckpointError:
    copy = ""
    if directory.parent.name == "snapshots":
        copy = (
            "Take a copy of the model (`hf download ID --local-dir DIR`) as target: {path: DIR}. "
        )
    settings = directory / "tokenizer_config.json"
    code = read_json(settings).get("auto_map") if settings.is_file() else None
    if code is not None:
        return CheckpointError(
            f"{directory} has code for a tokenizer, and neither {REQUIRED} nor {RANKS}; dflash-trt "
            "runs no code of a checkpoint",
            "Serve the pair by an engine that does, with engine.args: {trust_remote_code: true}: "
            "`dflash-trt export vllm CONFIG` or `dflash-trt export sglang CONFIG`",
        )
    write = f"Write {REQUIRED} there with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    return CheckpointError(f"{directory} has no {REQUIRED}", copy + write)


def copy_tokenizer(target: Path, build: Path) -> None:
    write_tokenizer(target, build / "tokenizer")


def write_tokenizer(target: Path, folder: Path) -> None:
    """Copy a tokenizer's files into a folder; of tiktoken.model what it is converted to."""
    converted = is_converted(target)
    for file in tokenizer_files(target):
        copy = folder / file.relative_to(target)
        if converted and file.name == RANKS:
            copy = folder / REQUIRED
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy_file(file, copy)  # and with it who may read it
        if copy.name == REQUIRED and converted:
            copy.write_bytes(convert(target))
        elif copy.name == SETTINGS and converted:
            copy.write_text(settings_of_converted(target), encoding="utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load tokenizer.json, or one made of tiktoken.model.

    CheckpointError if it is missing, invalid or a link to outside.
    """
    tokenizer_files(directory)
    file = directory / REQUIRED
    data = convert(directory) if is_converted(directory) else read_bytes(file, MAX_TOKENIZER)
    try:
        return _parse_tokenizer(data)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{file} is not a tokenizer ({error})", "Download or export the tokenizer again"
        ) from error


@lru_cache(maxsize=2)  # a build reads its target's, and then its own copy of it
def _parse_tokenizer(data: bytes) -> Tokenizer:
    with panics_as_errors():
        tokenizer = Tokenizer.from_buffer(data)
    # a file may request both, but transformers neither truncates nor pads
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens' texts by name, as transformers does."""
    given: dict[str, Any] = {}
    for file in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
        # the second only if the first lists no added tokens
        if file.is_file() and "added_tokens_decoder" not in given:
            given |= read_json(file)
    extra: dict[str, Any] = {}
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        more = given.get(name)
        if isinstance(more, dict):
            extra |= more
    tokens = {}
    for name, token in {**given, **extra}.items():
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (name in extra or name.endswith("_token")):
            tokens[name] = text
        elif name in ("bos_token", "eos_token", "pad_token", "unk_token") and token:
            raise CheckpointError(
                f"{name} in tokenizer_config.json of {directory} is no text",
                "Download or export the tokenizer again",
            )
    return tokens


class Card(NamedTuple):
    license: str = ""  # the Hub's name
    datasets: Sequence[str] = ()


def read_card(directory: Path) -> Card:
    """Read a model card; fields are empty if missing or invalid."""
    metadata = ""
    try:
        text = read_text(directory / CARD)
        if text.startswith("---\n"):
            _, metadata, _ = text.split("---\n", 2)
        values = parse_yaml(compose_yaml(metadata))
    except (OSError, ValueError, yaml.YAMLError):  # a card must not fail a build
        return Card()
    if not isinstance(values, dict):
        return Card()
    license = values.get("license")
    if license == "other":
        license = values.get("license_name")
    if not isinstance(license, str):
        license = ""
    datasets = values.get("datasets")
    if not isinstance(datasets, list):
        datasets = [datasets]
    return Card(license, [name for name in datasets if isinstance(name, str)])


def speller(tokenizer: Tokenizer) -> Spell:
    """Return a speller: the bytes that each token adds to a text that other tokens began."""
    added = tokenizer.get_added_tokens_decoder()
    decoder = tokenizer.decoder  # JSON state; the tokenizer's is larger
    byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
    byte_of = byte_level_alphabet()
    with panics_as_errors():
        before = tokenizer.encode("a", add_special_tokens=False).ids
        text_before = str(tokenizer.decode(before, skip_special_tokens=False))

    @cache
    def spell(token: int) -> bytes:
        piece: str | None = tokenizer.id_to_token(token)
        if piece is None:  # an embedding row without a token
            return b""
        if byte_level and token in added:
            return piece.encode()
        if byte_level and all(character in byte_of for character in piece):
            return bytes(byte_of[character] for character in piece)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
        if byte:
            return bytes.fromhex(byte[1])
        with panics_as_errors():
            text = str(tokenizer.decode([*before, token], skip_special_tokens=False))
        return text.removeprefix(text_before).encode()

    return spell
