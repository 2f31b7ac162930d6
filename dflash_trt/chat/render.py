"""The tokenizer's chat template: messages in, prompt text out."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_trt.chat.templates import Template
from dflash_trt.checkpoints import MORE_TEMPLATES, load_tokenizer, special_tokens
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.prompts import Prompt
from dflash_trt.weights import read_bytes, read_json

EXPORT_TOKENIZER = "Download or export the tokenizer again"
# names of templates
DEFAULT = "default"
TOOL_USE = "tool_use"
Render = Callable[..., str]


def load_chat_template(directory: Path) -> Render | None:
    """Return `render(messages=.., tools=.., add_generation_prompt=.., **kwargs)`, or None.

    Finds templates like `transformers` (`apply_chat_template`): in chat_template.jinja and
    additional_chat_templates, otherwise `chat_template` in chat_template.json or
    tokenizer_config.json. Among several, `tool_use` is used with tools, otherwise `default`. Raises
    CheckpointError for an invalid one.
    """
    file = directory / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    named = _template_sources(config, directory)
    if not all(isinstance(source, str) for source in named.values()):
        raise CheckpointError(f"the chat template of {directory} is no text", EXPORT_TOKENIZER)
    templates = {name: Template(str(source)) for name, source in named.items() if source}
    if not templates:
        return None
    default = templates.get(DEFAULT) or next(iter(templates.values()))
    with_tools = templates.get(TOOL_USE, default)
    defaults: dict[str, Any] = {"tools": None, "documents": None, **special_tokens(directory)}

    def render(**values: Any) -> str:
        template = with_tools if values.get("tools") else default
        return template(**{**defaults, **values})

    return render


def as_chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def load_encoding(directory: Path, **options: Any) -> Callable[[Prompt], list[int]]:
    """Return a function from a text or messages to token ids, with `options` for the template.

    Messages become plain text without a template, or if it refuses them.
    """
    tokenizer = load_tokenizer(directory)
    render = load_chat_template(directory)

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt).ids)
        if render is not None:
            with suppress(RequestError):
                chat = render(messages=prompt, add_generation_prompt=True, **options)
                ids = tokenizer.encode(chat, add_special_tokens=False).ids
                if ids:
                    return list(ids)
        return encode("\n".join(str(message.get("content", "")) for message in prompt))

    return encode


def _template_sources(config: Mapping[str, Any], directory: Path) -> dict[str, object]:
    source = config.get("chat_template")
    legacy = directory / "chat_template.json"
    if legacy.is_file():
        source = read_json(legacy).get("chat_template")
    named = _by_name(source)
    files = {file.stem: file for file in sorted(directory.glob(MORE_TEMPLATES))}
    default = directory / "chat_template.jinja"
    if default.is_file():
        named = {}
        files = {DEFAULT: default, **files}
    return named | {name: _read_utf8(file) for name, file in files.items()}


def _by_name(source: object) -> dict[str, object]:
    """Return the templates of `chat_template`: a text, an object, or a list of objects."""
    if not source:
        return {}
    if isinstance(source, dict):
        return source
    if not isinstance(source, list):
        return {DEFAULT: source}
    named = {}
    for entry in source:
        if not isinstance(entry, dict):
            continue
        name = entry.get("name")
        text = entry.get("template")
        if isinstance(name, str) and text:
            named[name] = text
    return named


def _read_utf8(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except ValueError as error:
        raise CheckpointError(f"{file} is not UTF-8 text ({error})", EXPORT_TOKENIZER) from error
