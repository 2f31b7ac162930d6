"""The tokenizer's own chat template: messages in, the prompt's text out."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_trt.chat.templates import LimitError, Template
from dflash_trt.checkpoints import load_tokenizer, read_bytes, read_json
from dflash_trt.checkpoints.checks import Finding
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.prompts import Prompt

AGAIN = "Download or export the tokenizer again"
DEFAULT = "default"  # among several named templates
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
    """`render(messages=.., tools=.., add_generation_prompt=.., **kwargs)`; None without a template.

    Finds and renders templates as `transformers` does (`apply_chat_template`): in
    chat_template.jinja, otherwise `chat_template` in chat_template.json or tokenizer_config.json,
    the one named `default` where there are several. CheckpointError for a damaged one.
    """
    file = directory / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    source = _template_of(config, directory)
    if not source:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"the chat template of {directory} is no text", AGAIN)
    tokens = {name: _token(name, config[name], directory) for name in SPECIAL if config.get(name)}
    template = Template(source)
    return lambda **values: template(**{**tokens, **values})


def try_chat_template(directory: Path) -> list[Finding]:
    """Loads and renders it once, as the server will; a warning where it refuses a plain message.

    CheckpointError where it cannot be loaded, or takes too much time or memory.
    """
    render = load_chat_template(directory)
    try:
        if render:
            render(messages=as_chat("Hello"), add_generation_prompt=True)
    except LimitError as error:
        raise CheckpointError(f"{error.problem} ({directory})", AGAIN) from None
    except RequestError as error:
        return [Finding("chat-template", "warning", error.problem, "Send what it takes")]
    return []


def as_chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def load_encoding(directory: Path, **options: Any) -> Callable[[Prompt], list[int]]:
    """A function from a text or messages to token ids, by a directory's tokenizer and template.

    Messages become plain text where there is no template or it refuses them. options: for it.
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


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages; RequestError unless each has a role, and there is one."""
    if not messages:
        raise RequestError("messages is empty", "Send at least one message.")
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise RequestError(
            "messages holds something that is not a message",
            'Send objects such as {"role": "user", "content": "..."}.',
        )
    return messages


def _template_of(config: Mapping[str, Any], directory: Path) -> object:
    """What is where `transformers` looks: a template's text, unless the file is damaged."""
    if (file := directory / "chat_template.jinja").is_file():
        try:
            return read_bytes(file).decode("utf-8")
        except ValueError as error:
            raise CheckpointError(f"{file} is not UTF-8 text ({error})", AGAIN) from error
    source: object = config.get("chat_template")
    if (legacy := directory / "chat_template.json").is_file():
        source = read_json(legacy).get("chat_template")
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict) and each.get("name") == DEFAULT]
        source = named[-1].get("template") if named else None
    return source


def _token(name: str, token: Any, directory: Path) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(f"{name} in tokenizer_config.json of {directory} is no text", AGAIN)
    return text
