"""Bytes of token ids, which `logprobs` use to name tokens."""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

Spell = Callable[[int], bytes]  # by token id


def speller(tokenizer: Tokenizer) -> Spell:
    """Return a speller for byte-level, byte-fallback or plain vocabularies."""
    added = tokenizer.get_added_tokens_decoder()
    decoder = tokenizer.decoder  # JSON state; the tokenizer's is larger
    byte_level = "ByteLevel" in _decoders(json.loads(decoder.__getstate__()) if decoder else None)
    byte_of = _byte_level_alphabet()

    def spell(token: int) -> bytes:
        if token in added:
            return str(added[token].content).encode()
        piece: str = tokenizer.id_to_token(token) or ""  # an embedding row without a token
        if byte_level and all(character in byte_of for character in piece):
            return bytes(byte_of[character] for character in piece)
        if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes.fromhex(found[1])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    return spell


def _decoders(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    return [decoder["type"], *(each["type"] for each in decoder.get("decoders", []))]


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 is itself, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + n): byte for n, byte in enumerate(others)},
    }
