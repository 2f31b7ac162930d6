"""What a client asks for, read from the input tensors of the public model."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.decoding.sampling import Sampling
from dflash_trt.decoding.scheduler import check_request
from dflash_trt.decoding.sequence import Request
from dflash_trt.errors import RequestError
from dflash_trt.serving.chat import Render, parse_json, parse_messages
from dflash_trt.serving.settings import Settings

MAX_TOKENS = 128  # when the client does not say and the prompt leaves room
MOST_CHOICES = 64
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
MOST_WORDS = 64  # stop words or bad words of a request

Inputs = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Ask:
    """One client's request: a decoding request for each of its n choices."""

    choices: list[Request]
    streaming: bool
    prefix: str  # text to give out before the generated one: the prompt, or nothing
    stop_words: tuple[str, ...]


def choices_asked(inputs: Inputs) -> int:
    """n, the number of choices; RequestError when there cannot be so many."""
    n: int = _value(inputs, "n", 1)
    if not 1 <= n <= MOST_CHOICES:
        raise RequestError(f"n is {n}", f"Ask for 1 to {MOST_CHOICES} choices.")
    return n


def parse_request(
    inputs: Inputs, tokenizer: Tokenizer, template: Render | None, settings: Settings
) -> Ask:
    """Raises `RequestError` for anything that cannot be run."""
    text, is_chat = _prompt_text(inputs, template)
    if len(text) > settings.max_seq_len * _longest_token(tokenizer):
        raise RequestError(
            f"The prompt's {len(text)} characters cannot be {settings.max_seq_len} tokens",
            "Shorten the prompt, or build with a larger serving.max_seq_len.",
        )
    # a chat template writes the special tokens itself
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=not is_chat).ids if text else []
    if not prompt:
        raise RequestError("The prompt is empty", "Send at least one token of text.")
    room = settings.max_seq_len - len(prompt)
    given = {name: _value(inputs, name, None) for name in SAMPLING if name in inputs}
    bad_words = _bad_words(_words(inputs, "bad_words"), tokenizer)
    sampling = Sampling(**given, bad_words=bad_words)
    if "seed" not in inputs and sampling.temperature:
        sampling = replace(sampling, seed=secrets.randbits(62))
    ignore_eos = _value(inputs, "ignore_eos", False)
    request = Request(
        prompt,
        # a chat ends by itself
        max_tokens=_value(inputs, "max_tokens", max(1, room if is_chat else min(MAX_TOKENS, room))),
        sampling=sampling,
        stop_ids=frozenset() if ignore_eos else settings.eos_token_ids,
        priority=_value(inputs, "priority", 0),
    )
    check_request(request, settings.max_seq_len)
    if sampling.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, max_tokens {request.max_tokens}",
            "Ask for at least as many tokens as must come.",
        )
    choices = [
        replace(request, sampling=replace(sampling, seed=(sampling.seed + i) % 2**63))
        for i in range(choices_asked(inputs))
    ]
    prefix = "" if _value(inputs, "exclude_input_in_output", True) else text
    return Ask(choices, _value(inputs, "stream", False), prefix, _words(inputs, "stop_words"))


def _prompt_text(inputs: Inputs, template: Render | None) -> tuple[str, bool]:
    """The prompt, and whether it comes from messages."""
    text, messages = _value(inputs, "text_input", b""), _value(inputs, "messages", b"")
    if text and messages:
        raise RequestError("text_input and messages are both given", "Send one of the two.")
    if not messages:
        return _decode("text_input", text), False
    if template is None:
        raise RequestError(
            "This model's tokenizer has no chat template", "Send text_input instead of messages."
        )
    more = parse_json("chat_template_kwargs", _value(inputs, "chat_template_kwargs", b"{}"), dict)
    tools = parse_json("tools", _value(inputs, "tools", b"[]"), list)
    rendered = template(
        **{
            **more,
            "messages": parse_messages(messages),
            "tools": tools or None,
            "add_generation_prompt": _value(inputs, "add_generation_prompt", True),
        }
    )
    return rendered, True


@lru_cache(maxsize=1)
def _longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token: longer texts are refused without tokenizing them."""
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _value(inputs: Inputs, name: str, default: Any) -> Any:
    """The one element of an input, or the default when it was not sent."""
    if name not in inputs:
        return default
    if inputs[name].size != 1:
        raise RequestError(f"{name} has {inputs[name].size} elements", "Send one.")
    return inputs[name].item()


def _words(inputs: Inputs, name: str) -> tuple[str, ...]:
    values = inputs[name].ravel().tolist() if name in inputs else []
    words = tuple(_decode(name, value) for value in values)
    if not all(words):
        raise RequestError(f"{name} holds an empty string", "Leave it out.")
    if len(words) > MOST_WORDS:
        raise RequestError(f"{name} has {len(words)} words", f"Send at most {MOST_WORDS}.")
    return words


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Their token ids, at the start of a text and after a space, as vLLM reads them."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False).ids)
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False).ids)
        found[plain] = None
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found[spaced] = None
    return tuple(ids for ids in found if ids)


def _decode(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8", "Encode it as UTF-8.") from error
