"""N-gram lookup: what followed a text's last tokens when they stood there before."""

from collections.abc import Iterable

MAX_MATCH = 16  # longest match that is measured


class NgramIndex:
    """Index of where each 1-, 2- and 3-gram of a text was last followed by a token.

    Three is the longest, as in transformers' prompt_lookup: five gained nothing in a replay of the
    demo pair's texts (3.36 tokens a round with either).
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        # keys are integers: that many tuples would burden the garbage collector
        self._after: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        self._end = (-1, -1, -1)  # the last n-grams of one, two and three tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; about 0.5 us each."""
        text = self._text
        after_one, after_two, after_three = self._after
        one, two, three = self._end
        for position, token in enumerate(tokens, len(text)):
            after_one[one] = position
            after_two[two] = position
            after_three[three] = position
            three = two << 32 | token
            two = one << 32 | token
            one = token
            text.append(token)
        self._end = one, two, three

    def find(self, count: int) -> tuple[int, list[int]]:
        """Return the length of a match with the text's end and the `count` tokens after it.

        Takes the latest match of the longest n-gram, three tokens at most, then measures its length
        up to `MAX_MATCH`. A match that runs into the end of the text continues with its own copy,
        as a loop does. Returns (0, []) if the last token is new.
        """
        text = self._text
        length, start = self._latest()
        if not length:
            return 0, []
        limit = min(start, MAX_MATCH)
        while length < limit and text[start - 1 - length] == text[-1 - length]:
            length += 1
        tokens = text[start : start + count]
        while len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return length, tokens

    def _latest(self) -> tuple[int, int]:
        """Return the longest n-gram at the text's end that was there before, and where it ended.

        The length is 0 if there is none.
        """
        for length in (3, 2, 1):
            position = self._after[length - 1].get(self._end[length - 1])
            if position is not None:
                return length, position
        return 0, 0
