"""Tools of `/v1/responses`: offered to the model as functions, their calls told as they were sent.

A custom tool takes one text, a namespace groups tools of one server, and a hosted tool runs at
OpenAI: it is left out, as the answer can do without it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.chat.formats.definitions import NAME
from dflash_trt.serving.http.failures import Failure

Json = dict[str, Any]
INPUT = "input"  # the one argument of a custom tool
BETWEEN = "__"  # a namespace and a tool's name, as clients of MCP name such functions
CHOICES = ("auto", "none", "required")
HOSTED = {
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
    *("computer", "computer_use_preview", "mcp", "tool_search", "programmatic_tool_calling"),
    *("local_shell", "shell", "apply_patch"),
}
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class Origin:
    """What a function of the prompt is in the caller's request."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass
class Tools:
    functions: list[Json] = field(default_factory=list)  # in the form of chat completions
    origins: dict[str, Origin] = field(default_factory=dict)  # by the name of the function
    places: list[str] = field(default_factory=list)  # of each function in the request
    left_out: list[str] = field(default_factory=list)  # types of hosted tools

    def add(self, place: str, origin: Origin, function: Json) -> None:
        name = function_name(origin.name, origin.namespace)
        if not NAME.fullmatch(name):
            message = f"'{place}.name' is no name: use 1 to 128 of letters, digits, _, - and ."
            raise Failure(400, message, "tools")
        if name in self.origins:
            message = f"'{place}' has the name of another tool, {origin.name!r}."
            raise Failure(400, message, "tools")
        self.origins[name] = origin
        self.places.append(place)
        self.functions.append({"type": "function", "function": {**function, "name": name}})


def function_name(name: str, namespace: str | None) -> str:
    return f"{namespace}{BETWEEN}{name}" if namespace else name


def read_tools(definitions: Sequence[Any]) -> Tools:
    """Return the functions of a request's tools. Raises Failure for a wrong definition."""
    tools = Tools()
    for index, definition in enumerate(definitions):
        _read_tool(tools, f"tools[{index}]", definition, namespace=None)
    return tools


def _read_tool(tools: Tools, place: str, definition: Any, namespace: Json | None) -> None:
    if not isinstance(definition, dict):
        raise Failure(400, f"'{place}' is not an object.", "tools")
    kind = definition.get("type")
    if kind in HOSTED and namespace is None:
        tools.left_out.append(str(kind))
        return
    if kind not in ("function", "custom", "namespace") or (kind == "namespace" and namespace):
        message = f"'{place}' is of type {str(kind)[:40]!r}: send functions, custom tools or both."
        raise Failure(400, message, "tools")
    name = definition.get("name")
    if not isinstance(name, str):
        raise Failure(400, f"'{place}.name' is missing: give the tool one.", "tools")
    if kind == "namespace":
        members = definition.get("tools")
        if not isinstance(members, list):
            raise Failure(400, f"'{place}.tools' is not a list of tools.", "tools")
        for index, member in enumerate(members):
            _read_tool(tools, f"{place}.tools[{index}]", member, definition)
        return
    origin = Origin(name, namespace["name"] if namespace else None, custom=kind == "custom")
    function = _custom(place, definition) if origin.custom else _function(place, definition)
    about = (namespace or {}).get("description")
    texts = [text for text in (about, function.get("description")) if isinstance(text, str)]
    if texts:
        function["description"] = "\n\n".join(texts)
    tools.add(place, origin, function)


def _function(place: str, definition: Mapping[str, Any]) -> Json:
    parameters = definition.get("parameters")
    describes_object = parameters is None or (
        isinstance(parameters, dict) and parameters.get("type", "object") == "object"
    )
    if not describes_object:
        message = f"'{place}.parameters' must be a JSON schema of type object."
        raise Failure(400, message, "tools")
    return {name: definition[name] for name in FUNCTION_FIELDS if name in definition}


def _custom(place: str, definition: Mapping[str, Any]) -> Json:
    form = definition.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        message = f"'{place}.format' must be of type text or grammar."
        raise Failure(400, message, "tools")
    about = definition.get("description")
    texts = [about] if isinstance(about, str) else []
    if form["type"] == "grammar":
        syntax = form.get("syntax")
        texts.append(f"The input follows this {syntax} grammar:\n{form.get('definition')}")
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"description": "\n\n".join(texts), "parameters": schema}


def read_choice(choice: Any, tools: Tools) -> tuple[Any, Tools]:
    """Return `tool_choice` in the form of chat completions, and the tools that it leaves.

    Raises Failure for a choice that is unknown, or that only a hosted tool could meet.
    """
    if isinstance(choice, str) and choice in CHOICES:
        if choice == "required" and not tools.functions:
            raise _no_function(tools)
        return choice, tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in HOSTED:
        raise _needs_hosted(str(kind))
    if kind == "allowed_tools":
        return _read_allowed(choice, tools)
    if kind not in ("function", "custom") or not isinstance(choice.get("name"), str):
        message = (
            '\'tool_choice\' must be "auto", "none", "required", '
            '{"type": "function", "name": ".."}, {"type": "custom", "name": ".."} or '
            '{"type": "allowed_tools", "mode": "auto", "tools": [..]}.'
        )
        raise Failure(400, message, "tool_choice")
    name = function_name(choice["name"], choice.get("namespace"))
    if name not in tools.origins:
        message = f"'tool_choice' names {name[:64]!r}, which is none of the tools."
        raise Failure(400, message, "tool_choice")
    return {"type": "function", "function": {"name": name}}, tools


def _read_allowed(choice: Mapping[str, Any], tools: Tools) -> tuple[Any, Tools]:
    mode, members = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(members, list):
        message = "'tool_choice' of type allowed_tools needs a mode, auto or required, and tools."
        raise Failure(400, message, "tool_choice")
    allowed = {
        function_name(str(member.get("name")), member.get("namespace"))
        for member in members
        if isinstance(member, dict)
    }
    chosen = Tools(left_out=tools.left_out)
    for function, place in zip(tools.functions, tools.places, strict=True):
        name = function["function"]["name"]
        if name in allowed:
            chosen.functions.append(function)
            chosen.places.append(place)
            chosen.origins[name] = tools.origins[name]
    return read_choice(mode, chosen)


def _no_function(tools: Tools) -> Failure:
    if tools.left_out:
        return _needs_hosted(tools.left_out[0])
    return Failure(400, "'tool_choice' asks for a call: send 'tools'.", "tool_choice")


def _needs_hosted(kind: str) -> Failure:
    message = (
        f"'tool_choice' asks for a call of {kind}, which does not run here: send functions, or let "
        "tool_choice be auto."
    )
    return Failure(400, message, "tool_choice")


def call_of(item: Mapping[str, Any], place: str) -> Json:
    """Return a call of the conversation in the form of chat completions, under its function."""
    custom = item["type"] == "custom_tool_call"
    for name in ("call_id", "name"):
        if not isinstance(item.get(name), str):
            raise Failure(400, f"'{place}.{name}' must be a string.", "input")
    argument = item.get("input") if custom else item.get("arguments") or "{}"
    if not isinstance(argument, str):
        what = "input" if custom else "arguments"
        raise Failure(400, f"'{place}.{what}' must be a string.", "input")
    arguments = json.dumps({INPUT: argument}, ensure_ascii=False) if custom else argument
    function = {
        "name": function_name(item["name"], item.get("namespace")),
        "arguments": arguments,
    }
    return {"id": item["call_id"], "type": "function", "function": function}


def custom_input(arguments: str) -> str:
    """Return a custom tool's input from the model's arguments; as they are if they were cut."""
    try:
        value = json.loads(arguments, strict=False)[INPUT]
    except (ValueError, LookupError, TypeError):
        return arguments
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def names_of(left_out: Iterable[str]) -> str:
    return ", ".join(sorted(set(left_out)))
