"""Text that ends at a stop word, which is never given out, not even its beginning."""

from collections.abc import Sequence
from functools import lru_cache


class StopWords:
    """Holds back what may become a stop word; the pieces are the text before the first one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._matched = [0] * len(words)  # characters of each that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be given out now, and whether a stop word has appeared."""
        self._held += text
        places = [place for word in self._words if (place := self._held.find(word)) >= 0]
        if places:
            given, self._held = self._held[: min(places)], ""
            return given, True
        for i, word in enumerate(self._words):
            self._matched[i] = _advance(word, self._matched[i], text)
        cut = len(self._held) - max(self._matched, default=0)
        given, self._held = self._held[:cut], self._held[cut:]
        return given, False

    def rest(self) -> str:
        """What was held back, when the text has ended without a stop word."""
        given, self._held = self._held, ""
        return given


def _advance(word: str, matched: int, text: str) -> int:
    """How much of the word's beginning the text so far ends with, now that `text` has come.

    The word is not in it. As Knuth, Morris and Pratt do: each character is looked at once.
    """
    shorter = _borders(word)
    for character in text:
        while matched and word[matched] != character:
            matched = shorter[matched - 1]
        matched += word[matched] == character
    return matched


@lru_cache(maxsize=256)
def _borders(word: str) -> tuple[int, ...]:
    """Of each beginning of the word, the longest shorter one that it ends with."""
    found, matched = [0], 0
    for character in word[1:]:
        while matched and word[matched] != character:
            matched = found[matched - 1]
        matched += word[matched] == character
        found.append(matched)
    return tuple(found)
