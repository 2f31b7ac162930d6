"""Text of a growing token sequence, piece by piece, never splitting a UTF-8 character."""

from tokenizers import Tokenizer

from dflash_trt.panics import panics_as_errors

HOLE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not (yet) a character


class Detokenizer:
    """Turns tokens into text as they come; the pieces add up to the text of all.

    Only a window of the last tokens is decoded. It begins one piece back, since some decoders drop
    the leading space of a text's first token.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        """hidden: tokens to leave out, special or not."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._context = 0  # tokens that the window begins with, whose text was given out
        self._given = 0  # characters of the window's text, given out

    def push(self, tokens: list[int], *, last: bool = False) -> str:
        """The new text with `tokens`; an unfinished character is withheld until `last`."""
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
