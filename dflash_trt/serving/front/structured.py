"""What a request's text has to follow: OpenAI's `response_format`, or one of vLLM's `guided_*`."""

import json
import re
from collections.abc import Callable

from dflash_trt.decoding import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.serving.front.inputs import Inputs

MAX_BYTES = 2**16
MAX_GBNF = 2**13  # bytes: llguidance reads 1,000 rules in 2 s
ANY_OBJECT = '{"type": "object"}'


def grammar_of(inputs: Inputs) -> Grammar | None:
    """None: the text is free. RequestError for two of them, and for what cannot be read."""
    found: dict[str, Grammar] = {}
    for name, read in READERS.items():
        if (size := inputs.size(name)) > MAX_BYTES:
            raise RequestError(f"{name} is {size} bytes", f"Send at most {MAX_BYTES}.")
        if name in inputs and (grammar := read(inputs, name)) is not None:
            found[name] = grammar
    if len(found) > 1:
        raise RequestError(f"{' and '.join(found)} are both given", "Send one of them.")
    return next(iter(found.values()), None)


def _response_format(inputs: Inputs, name: str) -> Grammar | None:
    value = inputs.json(name)
    kind, schema = value.get("type"), value.get("json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", ANY_OBJECT, name)
    if kind != "json_schema" or not isinstance(schema, dict) or "schema" not in schema:
        raise RequestError(
            f"response_format is of type {json.dumps(kind)[:40]} and lacks what that needs",
            'Send {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": {..}}}.',
        )
    return Grammar("json_schema", json.dumps(schema["schema"], ensure_ascii=False), name)


def _schema(inputs: Inputs, name: str) -> Grammar:
    return Grammar("json_schema", json.dumps(inputs.json(name), ensure_ascii=False), name)


def _regex(inputs: Inputs, name: str) -> Grammar:
    return Grammar("regex", inputs[name], name)


def _choice(inputs: Inputs, name: str) -> Grammar:
    if not inputs[name]:
        raise RequestError(f"{name} is empty", "Send at least one text.")
    texts = (re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text) for text in inputs[name])
    return Grammar("regex", "|".join(texts), name)


def _lark(inputs: Inputs, name: str) -> Grammar:
    text = inputs[name]
    if "::=" not in text:
        return Grammar("lark", text, name)
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415

    if (size := inputs.size(name)) > MAX_GBNF:
        raise RequestError(
            f"{name} is {size} bytes of GBNF", f"Send at most {MAX_GBNF}, or llguidance's Lark."
        )
    try:
        return Grammar("lark", any_to_lark(text), name)
    except Exception as error:  # its parser raises what it likes
        raise RequestError(
            f"{name} is no GBNF: {str(error)[:200]}", "Correct it, or send llguidance's Lark."
        ) from error


READERS: dict[str, Callable[[Inputs, str], Grammar | None]] = {
    "response_format": _response_format,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
}
