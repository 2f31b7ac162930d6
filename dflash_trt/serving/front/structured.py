"""Grammars of requests: OpenAI's `response_format`, or vLLM's `guided_*`."""

import json
import re
from typing import Any

from dflash_trt.chat import ChatModel, ChatPrompt
from dflash_trt.decoding import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.json_schema import ascii_classes, without_annotations
from dflash_trt.request_schema import GenerateRequest

MAX_GBNF = 2**13  # bytes: llguidance takes 2 s to read 1,000 rules
FORMAT_FIELDS = {"name", "description", "schema", "strict"}
ANY_OBJECT = '{"type": "object"}'


def grammar_of(asked: GenerateRequest) -> Grammar | None:
    """Return the grammar that the output must follow; None: free text.

    Raises RequestError for more than one grammar, or an invalid one.
    """
    sent = asked.model_fields_set
    found = [
        grammar
        for name, read in READERS.items()
        if name in sent and (grammar := read(name, getattr(asked, name))) is not None
    ]
    if len(found) > 1:
        names = " and ".join(each.name for each in found)
        raise RequestError(f"{names} are both given", "Send one of them.")
    return found[0] if found else None


def chat_grammar(asked: Grammar | None, prompt: ChatPrompt, model: ChatModel) -> Grammar | None:
    """Return the grammar of a chat's answer: required calls, or optional calls and `asked`.

    asked: the answer's grammar. Raises RequestError if both cannot be combined.
    """
    of_answer = asked and asked.name == "response_format"  # other grammars apply to the whole text
    if prompt.grammar and asked and not of_answer:
        raise RequestError(f"tool_choice and {asked.name} are both given", "Send one of them.")
    if prompt.grammar:
        return Grammar("lark", prompt.grammar, "tools")  # errors name a tool's schema
    if asked is None or not of_answer or not (prompt.tools or prompt.thinking):
        return asked
    return Grammar("lark", model.grammar(prompt, json.loads(asked.text)), asked.name)


def _response_format(name: str, value: dict[str, Any]) -> Grammar | None:
    """Return the grammar; the schema may also be in the format itself, as other servers accept."""
    value = {name: each for name, each in value.items() if each is not None}
    kind = value.pop("type", None)
    wrapped = kind == "json_schema" and isinstance(value.get("json_schema"), dict)
    inner = value.pop("json_schema") if wrapped else value
    unknown = {field for field, each in inner.items() if each is not None} - FORMAT_FIELDS
    if unknown := unknown | (value.keys() if wrapped else set()):
        raise RequestError(f"{name} holds {min(unknown)[:40]!r}", "Leave it out.")
    schema = inner.get("schema")
    if schema is None and kind in ("text", "json_object"):
        return None if kind == "text" else Grammar("json_schema", ANY_OBJECT, name)
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict | bool):
        raise RequestError(
            f"response_format is of type {json.dumps(kind)[:40]} and lacks what that needs",
            'Send {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": {..}}}.',
        )
    return _schema(name, schema)


def _schema(name: str, schema: Any) -> Grammar:
    text = json.dumps(without_annotations(schema), ensure_ascii=False)
    return Grammar("json_schema", text, name)


def _choice(name: str, texts: list[str]) -> Grammar:
    if not texts:
        raise RequestError(f"{name} is empty", "Send at least one text.")
    escaped = (re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text) for text in texts)
    return Grammar("regex", "|".join(escaped), name)


def _lark(name: str, text: str) -> Grammar:
    if "::=" not in text:
        return Grammar("lark", text, name)
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415

    if (size := len(text.encode())) > MAX_GBNF:
        raise RequestError(
            f"{name} is {size} bytes of GBNF", f"Send at most {MAX_GBNF}, or llguidance's Lark."
        )
    try:
        return Grammar("lark", any_to_lark(text), name)
    except Exception as error:  # the parser raises any type
        raise RequestError(
            f"{name} is no GBNF: {str(error)[:200]}", "Correct it, or send llguidance's Lark."
        ) from error


READERS: dict[str, Any] = {
    "response_format": _response_format,
    "guided_json": _schema,
    "guided_regex": lambda name, pattern: Grammar("regex", ascii_classes(pattern), name),
    "guided_choice": _choice,
    "guided_grammar": _lark,
}
