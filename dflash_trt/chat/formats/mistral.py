"""Mistral: `[TOOL_CALLS]` before a JSON list, or in newer models before each `name[ARGS]{..}`.

Tokenizers v3 to v13 of mistral-common; some write `name[CALL_ID]id[ARGS]{..}`.
"""

from collections.abc import Sequence
from functools import partial

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.lark import Lark, json_calls
from dflash_trt.chat.formats.reader import ID_LENGTH, BrokenError, Reader, Steps, json_call

OPEN = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MARKERS = (OPEN, ID, ARGUMENTS)


def starts(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return what a call begins with whose first mark is missing."""
    return tuple(f"{tool.name}{mark}" for tool in tools for mark in (ID, ARGUMENTS))


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    if (yield from reader.attempt(_first_call(reader))):
        while (yield from reader.attempt(_next_call(reader))):
            pass
        yield from reader.close("]")


def _first_call(reader: Reader) -> Steps[None]:
    yield from reader.skip_all(OPEN)
    yield from reader.skip_all("[")
    yield from reader.skip_space()
    if (yield from reader.starts_with("{")):
        yield from json_call(reader)
        return
    name = (yield from reader.collect_until(ID, ARGUMENTS, OPEN, "{")).strip()
    if not NAME.fullmatch(name):
        raise BrokenError
    call_id = ""
    if (yield from reader.skip_all(ID)):
        call_id = (yield from reader.collect_until(ARGUMENTS, OPEN, "{")).strip()
    if len(call_id) != ID_LENGTH:
        call_id = ""
    has_mark = yield from reader.skip_all(ARGUMENTS)
    yield from reader.skip_space()
    if has_mark and (not reader.text or (yield from reader.starts_with(OPEN))):
        reader.begin_empty_call(name, call_id)
    else:
        yield from reader.json_arguments(name, call_id)


def _next_call(reader: Reader) -> Steps[None]:
    yield from reader.skip_space()
    yield from reader.skip(",")
    yield from reader.skip_space()
    yield from json_call(reader)


def list_calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    call = lark.rule("call", json_calls(lark, tools, "arguments"))
    rest = f'(", " {call})*' if parallel else ""
    return f'{lark.marker(OPEN)} " [" {call} {rest} "]"'


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool, with_id: bool = False) -> str:
    ids = f"{lark.marker(ID)} /[a-zA-Z0-9]{{{ID_LENGTH}}}/" if with_id else ""
    functions = [
        f"{lark.text(tool.name)} {ids} {lark.marker(ARGUMENTS)} {lark.json(tool.schema)}"
        for tool in tools
    ]
    call = lark.rule("call", f"{lark.marker(OPEN)} ({' | '.join(functions)})")
    return f"{call}+" if parallel else call


calls_with_id = partial(calls, with_id=True)
