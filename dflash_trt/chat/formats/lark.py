"""Builder of llguidance grammars, rule by rule: https://github.com/guidance-ai/llguidance

Its Lark dialect has JSON Schemas (`%json`) and tokens by id (`<[5]>`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.chat.formats.definitions import Tool
from dflash_trt.errors import RequestError

SAY_NOTHING = {"title", "description", "default", "examples", "$defs", "definitions", "$schema"}
ANYTHING = r"/(.|\n)*/"
# as Python's templates write JSON: fixed text is drafted for free
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """Rules of one grammar; added: ids of tokens not merged from others, such as markers.

    first_call: the number of the next call, where ids count a conversation's.
    """

    def __init__(self, added: Mapping[str, int], first_call: int = 0) -> None:
        self.first_call = first_call
        self._added = added
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str, options: str = "") -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules[name] = f"{options}: {body}"
        return name

    def define(self, rule: str, body: str) -> None:
        self._rules[rule] = f": {body}"

    def text(self, text: str) -> str:
        return json.dumps(text)

    def marker(self, marker: str) -> str:
        token = self._added.get(marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def up_to(self, marker: str) -> str:
        """Return a rule of any text followed by the marker."""
        if marker in self._added:
            return f"{self.rule('text', ANYTHING)} {self.marker(marker)}"
        return self.rule("text", ANYTHING, f"[suffix={json.dumps(marker)}]")

    def json(self, schema: Mapping[str, Any]) -> str:
        spaced = {**schema, "x-guidance": SPACING}
        return self.rule("json", f"%json {json.dumps(spaced)}")

    def answer(self, schema: Any) -> str:
        """Return the rule of a text by a JSON schema, which may set its own spacing."""
        spaced = {"x-guidance": SPACING, **schema} if isinstance(schema, dict) else schema
        return self.rule("answer", f"%json {json.dumps(spaced)}")

    def grammar(self, start: str) -> str:
        rules = {"start": f": {start}", **self._rules}
        return "".join(f"{name}{rest}\n" for name, rest in rules.items())


def json_calls(lark: Lark, tools: Sequence[Tool], key: str) -> str:
    """Return the rule of a call of one tool, with arguments under `key`.

    Uses JSON's own tokens: a longer literal could be lexed as the start of another object.
    """
    start, name, colon, comma = map(lark.text, ("{", '"name"', ": ", ", "))
    rest = f"{comma} {lark.text(json.dumps(key))} {colon}"
    functions = [
        f"{lark.text(json.dumps(tool.name))} {rest} {lark.json(tool.schema)}" for tool in tools
    ]
    return f"""{start} {name} {colon} ({" | ".join(functions)}) "}}\""""


def refuse_others(schema: Mapping[str, Any], known: set[str], place: str) -> None:
    """Raise RequestError for schema keywords that a format's values cannot enforce."""
    others = sorted(schema.keys() - known - SAY_NOTHING)
    if others:
        raise not_enforceable(repr(others[0][:64]), place[:128])


def not_enforceable(what: str, place: str) -> RequestError:
    return RequestError(
        f"tools: {what} in the schema of {place} cannot be enforced in the form that this model "
        "writes calls in",
        "Leave it out, or let tool_choice be auto.",
    )
