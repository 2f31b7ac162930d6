"""GGUF files of a vocabulary alone, as llama.cpp's converter writes it."""

import json
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from tests.support.vocabularies import SPACE, Real

BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
RUNS = ("\n", SPACE)  # Gemma's runs of these are added tokens, of SentencePiece's models


def write(
    file: Path,
    real: Real,
    model: str,
    pre: str = "default",
    *,
    architecture: str = "llama",
    runs: bool = False,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a published vocabulary; `runs`: as Gemma's converter changes spaces and new lines."""
    known = {number: text for text, number in real.tokenizer.get_vocab().items()}
    tokens = [known.get(number, f"[PAD{number}]") for number in range(max(known) + 1)]
    types = [_type_of(number, known, real) for number in range(len(tokens))]
    scores = [0.0] * len(tokens)
    for number, text in enumerate(tokens):
        if types[number] == TokenType.NORMAL:
            scores[number] = -float(number)
        if runs and types[number] == TokenType.NORMAL and _is_run(text):
            tokens[number] = text.replace(SPACE, " ")
            types[number] = TokenType.USER_DEFINED
            scores[number] = -1000.0
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model == "llama":
        writer.add_token_scores(scores)
    else:
        merges = json.loads(real.tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    for key, value in (more or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _type_of(number: int, known: dict[int, str], real: Real) -> TokenType:
    if number not in known:
        return TokenType.UNUSED
    if number in real.special:
        return TokenType.UNKNOWN if known[number] == "<unk>" else TokenType.CONTROL
    return TokenType.BYTE if known[number] in BYTES else TokenType.NORMAL


def _is_run(text: str) -> bool:
    return any(text.strip(character) == "" for character in RUNS) and text != SPACE
