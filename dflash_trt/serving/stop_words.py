"""Text that ends at a stop word, which is never given out, not even its beginning."""

from collections.abc import Sequence


class StopWords:
    """Holds back what may become a stop word; the pieces are the text before the first one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be given out now, and whether a stop word has appeared."""
        self._held += text
        places = [place for word in self._words if (place := self._held.find(word)) >= 0]
        if places:
            given, self._held = self._held[: min(places)], ""
            return given, True
        keep = max((overlap(self._held, word) for word in self._words), default=0)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given, False

    def rest(self) -> str:
        """What was held back, when the text has ended without a stop word."""
        given, self._held = self._held, ""
        return given


def overlap(text: str, word: str) -> int:
    """How many of the last characters of `text` are the first ones of `word`, but not all of it."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
