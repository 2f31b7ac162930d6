"""Prompt lookup: drafts copied from where the last tokens stood before (Saxena 2023)."""

from collections.abc import Iterable

MAX_MATCH = 16  # tokens of a match that are looked at: a long one promises much


class NgramIndex:
    """A text, and where each run of one, two and three of its tokens was last followed by another.

    As in transformers' prompt_lookup, three is the longest: five found nothing better (a replay of
    the demo pair's texts, 3.36 tokens a round by either).
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        # by run, which is one number: so many tuples would be work for the garbage collector
        self._after: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        self._end = (-1, -1, -1)  # the runs of the last one, two and three tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; about 0.5 us each."""
        text, (after_one, after_two, after_three) = self._text, self._after
        one, two, three = self._end
        for place, token in enumerate(tokens, len(text)):
            after_one[one] = after_two[two] = after_three[three] = place
            one, two, three = token, one << 32 | token, two << 32 | token
            text.append(token)
        self._end = one, two, three

    def find(self, count: int) -> tuple[int, list[int]]:
        """The length of a match and the `count` tokens that followed it.

        Of the earlier copies of the text's end, those of its last three tokens count if there are
        any, otherwise of two, otherwise of one; of these the latest. How far it is alike is
        measured up to `MAX_MATCH`. What runs into the end of the text goes on with its own copy, as
        a loop does. (0, []) if even the last token is new.
        """
        text = self._text
        places = [after.get(run) for after, run in zip(self._after, self._end, strict=True)]
        length = next((n for n in (3, 2, 1) if places[n - 1] is not None), 0)
        start = places[length - 1]
        if not length or start is None:
            return 0, []
        limit = min(start, MAX_MATCH)
        while length < limit and text[start - 1 - length] == text[-1 - length]:
            length += 1
        found = text[start : start + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return length, found
