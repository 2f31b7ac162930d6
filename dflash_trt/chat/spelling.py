"""The bytes behind a token id: the answer's `logprobs` name tokens by them."""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

Spell = Callable[[int], bytes]  # of a token id


def speller(tokenizer: Tokenizer) -> Spell:
    """For byte-level (GPT-2), byte-fallback (sentencepiece) and plain vocabularies."""
    added = tokenizer.get_added_tokens_decoder()
    decoder = tokenizer.decoder  # its state is JSON; that of the tokenizer has the vocabulary, too
    byte_level = "ByteLevel" in _decoders(json.loads(decoder.__getstate__()) if decoder else None)
    byte_of = _byte_level_alphabet()

    def spell(token: int) -> bytes:
        if token in added:
            return str(added[token].content).encode()
        piece: str = tokenizer.id_to_token(token) or ""  # a row of the embedding without a token
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
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + n): byte for n, byte in enumerate(others)},
    }
