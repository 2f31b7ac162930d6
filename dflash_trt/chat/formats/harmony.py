"""OpenAI's harmony format of gpt-oss: channels for reasoning, content and calls.

For example
`<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello`:
https://github.com/openai/harmony. The model's text keeps its markers; chat endpoints parse them.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.lark import Lark
from dflash_trt.chat.formats.reader import BrokenError, Reader, Steps

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
KIND = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END)
REASONING = "analysis"
RECIPIENT = re.compile(r" to=([^\s<]+)")
OURS = "functions."  # precedes the name of a request's tool


def has_channels(tokenizer: Tokenizer) -> bool:
    return all(tokenizer.token_to_id(marker) is not None for marker in MARKERS)


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    """Parse channels; without tools a call is content, header included."""
    pieces: list[str] = []
    marker = yield from reader.until((MESSAGE,), pieces.append)
    if marker is None:  # no channels after all
        reader.add_content("".join(pieces))
        return
    while marker == MESSAGE:
        header = "".join(pieces)
        reader.take(len(MESSAGE))
        to = RECIPIENT.search(header)
        if to and tools and to[1].startswith(OURS):
            yield from reader.attempt(_call(reader, header, to[1][len(OURS) :]))
        elif to:
            reader.add_content(header + MESSAGE)
        thinks = not to and header.endswith(CHANNEL + REASONING)
        give = reader.add_reasoning if thinks else reader.add_content
        ended = yield from reader.until((START, CHANNEL, END, CALL), give)
        if ended in (END, CALL):
            reader.take(len(ended))
            yield from reader.until((START, CHANNEL), reader.add_content)
        pieces = []
        marker = yield from reader.until((MESSAGE,), pieces.append)


def _call(reader: Reader, header: str, name: str) -> Steps[None]:
    reader.restore(header + MESSAGE)
    if not NAME.fullmatch(name):
        raise BrokenError
    yield from reader.skip_space()
    yield from reader.json_arguments(name)


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return the grammar of reasoning, then one call, which ends the turn."""
    functions = []
    for tool in tools:
        recipient = lark.text(f"commentary to={OURS}{tool.name} ")
        kind = f'{lark.marker(KIND)} "json"'
        functions.append(f"{recipient} {kind} {lark.marker(MESSAGE)} {lark.json(tool.schema)}")
    return f"{_thoughts(lark)} {lark.marker(CHANNEL)} ({' | '.join(functions)})"


def final(lark: Lark, answer: str) -> str:
    kind = f'(" "? {lark.marker(KIND)} "json")?'
    head = f'{lark.marker(CHANNEL)} "final" {kind} {lark.marker(MESSAGE)}'
    return f"{_thoughts(lark)} {head} {answer}"


def _thoughts(lark: Lark) -> str:
    thought = lark.rule(
        "thought",
        f'{lark.marker(CHANNEL)} "{REASONING}" {lark.marker(MESSAGE)} {lark.up_to(END)} '
        f'{lark.marker(START)} "assistant"',
    )
    return f"{thought}*"
