"""Text of a growing token sequence, piece by piece, never splitting a UTF-8 character."""

from tokenizers import Tokenizer

from dflash_trt.panics import panics_as_errors

HOLE = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for bytes that are not (yet) a character


class Detokenizer:
    """Turns tokens into text as they come; the pieces add up to the text of all tokens.

    Only a window of tokens is decoded: it starts one piece back, because some decoders treat the
    first token of a text differently (they drop its leading space).
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        """hidden: tokens that are no text, special or not."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._context = 0  # tokens at the start of the window whose text was given out before it
        self._given = 0  # characters of the window's text that were given out

    def push(self, tokens: list[int], *, last: bool = False) -> str:
        """The new text after `tokens`; an unfinished character is held back until `last`."""
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
