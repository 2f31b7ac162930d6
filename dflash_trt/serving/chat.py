"""The tokenizer's own chat template: messages in, the prompt's text out."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_trt.checkpoints.tokenizer import load_tokenizer
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.prompts import Prompt

SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

Render = Callable[..., str]


def load_chat_template(directory: Path) -> Render | None:
    """`render(messages=.., tools=.., add_generation_prompt=.., **kwargs)`; None: has no template.

    As `transformers` finds templates (chat_template.jinja, else `chat_template` in
    chat_template.json or tokenizer_config.json) and renders them (`apply_chat_template`). Of a
    named list of templates, `default` counts.
    """
    config = _read_json(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    elif (legacy := directory / "chat_template.json").is_file():
        source = _read_json(legacy).get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not source:
        return None
    tokens = {name: _text(config[name]) for name in SPECIAL if config.get(name)}
    try:
        template = _environment().from_string(source)
    except TemplateError as error:
        raise CheckpointError(
            f"the chat template of {directory} is not valid ({error})",
            "Download or export the tokenizer again",
        ) from error

    def render(**values: Any) -> str:
        try:
            return template.render(**{**tokens, **values})
        except Exception as error:  # a template may do anything with what it is given
            raise RequestError(
                f"the chat template refuses the messages: {error}",
                "Send roles and fields that the model's chat template knows",
            ) from error

    return render


def as_chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def load_encoding(directory: Path, **options: Any) -> Callable[[Prompt], list[int]]:
    """Token ids of a text as it is, or of messages, by the tokenizer and template of a directory.

    Messages are a plain text where there is no template, or one that wants something else.
    options: for it.
    """
    tokenizer, render = load_tokenizer(directory), load_chat_template(directory)

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt).ids)
        with suppress(RequestError):
            if render:
                chat = render(messages=prompt, add_generation_prompt=True, **options)
                if ids := tokenizer.encode(chat, add_special_tokens=False).ids:
                    return list(ids)
        return encode("\n".join(str(message.get("content", "")) for message in prompt))

    return encode


def parse_messages(text: bytes) -> list[dict[str, Any]]:
    """The `messages` input; RequestError unless it is a JSON list of objects with a role."""
    messages: list[dict[str, Any]] = parse_json("messages", text, list)
    if not messages:
        raise RequestError("messages is empty", "Send at least one message.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                "messages holds something that is not a message",
                'Send objects such as {"role": "user", "content": "..."}.',
            )
    return messages


def parse_json(name: str, text: bytes, kind: type) -> Any:
    """The JSON document in an input; RequestError unless it is one of the given kind."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON ({error})", "Send it as a JSON string.") from error
    if not isinstance(value, kind):
        raise RequestError(f"{name} is not a JSON {kind.__name__}", f"Send a JSON {kind.__name__}.")
    return value


class _Generation(Extension):
    """`{% generation %}` marks text for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json  # jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not JSON ({error})", "Export the tokenizer again"
        ) from error
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
