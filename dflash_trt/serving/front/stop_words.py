"""Stop words: the text ends before the first one."""

from collections.abc import Sequence
from functools import lru_cache


class StopWords:
    """Withholds what may become a stop word; what it gives out is the text before the first."""

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
        """What was withheld, when the text has ended without a stop word."""
        given, self._held = self._held, ""
        return given


def _advance(word: str, matched: int, text: str) -> int:
    """How many of the word's first characters the text ends with, after `text`.

    By Knuth, Morris and Pratt, who look at each character once. The word is not in the text.
    """
    shorter = _borders(word)
    for character in text:
        while matched and word[matched] != character:
            matched = shorter[matched - 1]
        matched += word[matched] == character
    return matched


@lru_cache(maxsize=256)
def _borders(word: str) -> tuple[int, ...]:
    """For each prefix of the word: the length of the longest shorter prefix that it ends with."""
    found, matched = [0], 0
    for character in word[1:]:
        while matched and word[matched] != character:
            matched = found[matched - 1]
        matched += word[matched] == character
        found.append(matched)
    return tuple(found)
