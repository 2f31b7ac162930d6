"""Channels: how gpt-oss separates its reasoning from its answer ("harmony", by OpenAI).

`<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello` is what
such a model writes: https://github.com/openai/harmony. The server gives this text out as it is; the
OpenAI front separates the channels.
"""

from tokenizers import Tokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKERS = (START, CHANNEL, MESSAGE, END)
REASONING = "analysis"


def has_channels(tokenizer: Tokenizer) -> bool:
    """Whether models with this tokenizer write in channels."""
    return all(tokenizer.token_to_id(marker) is not None for marker in MARKERS)


class Channels:
    """Separates reasoning and answer in one text, piece by piece.

    A tool call is part of the answer, with its header, as the model writes it.
    """

    def __init__(self) -> None:
        self._buffer = ""  # may become a marker
        self._header: str | None = ""  # what came of one; None: text follows
        self._in_channels = False
        self._reasons = False

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """The reasoning and the answer in the next piece of text."""
        self._buffer += text
        parts = {True: "", False: ""}
        while found := [
            (self._buffer.find(each), each) for each in MARKERS if each in self._buffer
        ]:
            place, marker = min(found)
            before, self._buffer = self._buffer[:place], self._buffer[place + len(marker) :]
            self._give(before, parts)
            if marker == MESSAGE:
                header = self._header or ""
                self._reasons, self._header = header.endswith(CHANNEL + REASONING), None
                self._in_channels = True
                if " to=" in header:
                    parts[False] += header + MESSAGE
            elif marker == END:
                self._reasons = False
            else:
                self._header = (self._header or "") + marker
        keep = 0 if last else max(overlap(self._buffer, marker) for marker in MARKERS)
        cut = len(self._buffer) - keep
        self._give(self._buffer[:cut], parts)
        self._buffer = self._buffer[cut:]
        if last and not self._in_channels and self._header:
            parts[False] += self._header
        return parts[True], parts[False]

    def _give(self, text: str, parts: dict[bool, str]) -> None:
        if self._header is None:
            parts[self._reasons] += text
        else:
            self._header += text


def overlap(text: str, word: str) -> int:
    """The length of the longest end of `text` that `word` begins with, shorter than `word`."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
