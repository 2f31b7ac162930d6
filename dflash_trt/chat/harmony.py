"""Channels: how gpt-oss keeps apart what it thinks and what it says ("harmony", by OpenAI).

`<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello` is what
such a model writes: https://github.com/openai/harmony. Its text goes out as it is, markers
included; whoever answers chats tells the channels apart.
"""

from tokenizers import Tokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKERS = (START, CHANNEL, MESSAGE, END)
THOUGHTS = "analysis"


def has_channels(tokenizer: Tokenizer) -> bool:
    """Whether models with this tokenizer write in channels."""
    return all(tokenizer.token_to_id(marker) is not None for marker in MARKERS)


class Channels:
    """Tells one answer's thoughts from what it says, piece by piece.

    A call of a tool is said, header included, as the model writes it.
    """

    def __init__(self) -> None:
        self._held = ""  # may become a marker
        self._header: str | None = ""  # so far; None: what comes is text
        self._begun = False
        self._thinks = False

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """What was thought and what was said in the next piece of text."""
        self._held += text
        parts = {True: "", False: ""}
        while found := [(self._held.find(each), each) for each in MARKERS if each in self._held]:
            place, marker = min(found)
            before, self._held = self._held[:place], self._held[place + len(marker) :]
            self._give(before, parts)
            if marker == MESSAGE:
                header = self._header or ""
                self._thinks, self._header = header.endswith(CHANNEL + THOUGHTS), None
                self._begun = True
                if " to=" in header:
                    parts[False] += header + MESSAGE
            elif marker == END:
                self._thinks = False
            else:
                self._header = (self._header or "") + marker
        keep = 0 if last else max(overlap(self._held, marker) for marker in MARKERS)
        cut = len(self._held) - keep
        self._give(self._held[:cut], parts)
        self._held = self._held[cut:]
        if last and not self._begun and self._header:  # it does not write in channels after all
            parts[False] += self._header
        return parts[True], parts[False]

    def _give(self, text: str, parts: dict[bool, str]) -> None:
        if self._header is None:
            parts[self._thinks] += text
        else:
            self._header += text


def overlap(text: str, word: str) -> int:
    """How many of the last characters of `text` are the first ones of `word`, but not all of it."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
