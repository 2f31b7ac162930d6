"""The files of a checkpoint directory: tokenizer, model card."""

import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tokenizers import Tokenizer

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


def tokenizer_files(directory: Path) -> list[Path]:
    """Return what exists, sorted; CheckpointError without tokenizer.json or for a link outside."""
    if not (directory / REQUIRED).is_file():
        raise _no_tokenizer(directory)
    named = [directory / name for name in (REQUIRED, *OPTIONAL)]
    files = [*named, *directory.glob(MORE_TEMPLATES)]
    files = sorted(file for file in files if file.is_file())
    for file in files:
        check_inside(directory, file)
    return files


def _no_tokenizer(directory: Path) -> CheckpointError:
    settings = directory / "tokenizer_config.json"
    code = read_json(settings).get("auto_map") if settings.is_file() else None
    if code is not None:  # Kimi's tiktoken.model
        return CheckpointError(
            f"{directory} has code for a tokenizer and no {REQUIRED}; dflash-trt runs no code of a "
            "checkpoint",
            "Serve the pair by an engine that does, with engine.args: {trust_remote_code: true}: "
            "`dflash-trt export vllm CONFIG` or `dflash-trt export sglang CONFIG`",
        )
    copy = ""
    if directory.parent.name == "snapshots":
        copy = (
            "Take a copy of the model (`hf download ID --local-dir DIR`) as target: {path: DIR}. "
        )
    write = f"Write {REQUIRED} there with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    return CheckpointError(f"{directory} has no {REQUIRED}", copy + write)


def copy_tokenizer(target: Path, build: Path) -> None:
    for file in tokenizer_files(target):
        copy = build / "tokenizer" / file.relative_to(target)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy_file(file, copy)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load tokenizer.json; CheckpointError if missing, invalid or a link to outside."""
    tokenizer_files(directory)
    file = directory / REQUIRED
    data = read_bytes(file, MAX_TOKENIZER)
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
    byte_of = _byte_level_alphabet()
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


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 is itself, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + n): byte for n, byte in enumerate(others)},
    }
