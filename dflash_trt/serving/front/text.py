"""Incremental detokenization: no partial characters, nothing from a stop word on."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from dflash_trt.errors import panics_as_errors

HOLE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not (yet) a character


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces add up to the whole text.

    Only a window of the last tokens is decoded. It begins one piece back, because some decoders
    drop the leading space of a text's first token.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        """Start an empty text; hidden: tokens to leave out, special or not."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._context = 0  # tokens at the window's start whose text was returned
        self._given = 0  # characters of the window's text already returned

    def push(self, tokens: list[int], *, last: bool = False) -> str:
        """Return the new text; an unfinished character is withheld until `last`."""
        self._window += tokens
        text = self._decode(self._window)
        complete = text if last else text.rstrip(HOLE)
        piece = complete[self._given :]
        self._given = max(self._given, len(complete))
        if len(complete) == len(text) and len(self._window) > self._context:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = len(self._decode(self._window))
        return piece

    def _decode(self, tokens: list[int]) -> str:
        tokens = [token for token in tokens if token not in self._hidden]
        with panics_as_errors():
            return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class StopWords:
    """Withholds a possible stop word; returns only text before the first one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._matched = [0] * len(words)  # characters of each that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return the text that is certain, and the stop word found or ""."""
        self._held += text
        places = [(place, word) for word in self._words if (place := self._held.find(word)) >= 0]
        if places:
            place, word = min(places)
            given, self._held = self._held[:place], ""
            return given, word
        for i, word in enumerate(self._words):
            self._matched[i] = _advance(word, self._matched[i], text)
        cut = len(self._held) - max(self._matched, default=0)
        given, self._held = self._held[:cut], self._held[cut:]
        return given, ""

    def rest(self) -> str:
        """Return the withheld text, when the text ended without a stop word."""
        given, self._held = self._held, ""
        return given


def _advance(word: str, matched: int, text: str) -> int:
    """Return how many leading characters of the word end the text, by Knuth-Morris-Pratt.

    The word itself must not be in the text.
    """
    shorter = _borders(word)
    for character in text:
        while matched and word[matched] != character:
            matched = shorter[matched - 1]
        matched += word[matched] == character
    return matched


@lru_cache(maxsize=256)
def _borders(word: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest proper border."""
    found, matched = [0], 0
    for character in word[1:]:
        while matched and word[matched] != character:
            matched = found[matched - 1]
        matched += word[matched] == character
        found.append(matched)
    return tuple(found)
