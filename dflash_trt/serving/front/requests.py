"""What a client asks for, read from the input tensors of the public model."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.build.settings import Settings
from dflash_trt.chat import Render, parse_json, parse_messages
from dflash_trt.decoding import Request, SamplingParams, check_request
from dflash_trt.errors import RequestError
from dflash_trt.panics import panics_as_errors

MAX_TOKENS = 128  # when the client does not say and the prompt leaves room
MOST_CHOICES = 64
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
MOST_WORDS, LONGEST_WORD, WORDS_BYTES = 64, 256, 2**14  # stop words or bad words of a request
MOST_STOP_IDS = 64
PROMPT_INPUTS = ("text_input", "messages", "tools", "chat_template_kwargs")
PROMPT_BYTES = 2**22  # of these together: 0.5 s to parse what JSON takes longest for

Inputs = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Ask:
    """One client's request: a decoding request for each of its n choices."""

    choices: list[Request]
    streaming: bool
    prefix: str  # text to give out before the generated one: the prompt, or nothing
    stop_words: tuple[str, ...]


def choices_asked(inputs: Inputs, most: int = MOST_CHOICES) -> int:
    """n, the number of choices; RequestError when there cannot be so many.

    most: sequences that one client can have at all.
    """
    n, most = _value(inputs, "n", 1), min(most, MOST_CHOICES)
    if not 1 <= n <= most:
        raise RequestError(f"n is {n}", f"Ask for 1 to {most} choices.")
    return int(n)


def parse_request(
    inputs: Inputs,
    tokenizer: Tokenizer,
    template: Render | None,
    settings: Settings,
    client: str = "",
) -> Ask:
    """Raises `RequestError` for anything that cannot be run, before it takes long or much memory.

    client: who asks.
    """
    most = settings.max_seq_len * _longest_token(tokenizer)  # characters
    _check_bytes(inputs, most)
    stop_words = _words(inputs, "stop_words")
    ids = _token_ids(inputs, "input_ids", tokenizer)
    text, is_chat = _prompt_text(inputs, template)
    if len(text) > most:
        raise RequestError(
            f"This model's maximum context length is {settings.max_seq_len} tokens: the prompt's "
            f"{len(text)} characters exceed it",
            "Shorten the prompt, or build with a larger serving.max_seq_len.",
        )
    # a chat template writes the special tokens itself
    prompt = _encode(tokenizer, [text], add_special_tokens=not is_chat)[0] if text else ids
    if not prompt:
        raise RequestError("The prompt is empty", "Send at least one token of text.")
    room = settings.max_seq_len - len(prompt)
    given = {name: _value(inputs, name, None) for name in SAMPLING if name in inputs}
    bad_words = _bad_words(_words(inputs, "bad_words"), tokenizer)
    echo = not _value(inputs, "exclude_input_in_output", True)
    scored = echo and "logprobs" in inputs
    sampling = SamplingParams(**given, bad_words=bad_words, prompt_logprobs=scored)
    if "seed" not in inputs and sampling.temperature:
        sampling = replace(sampling, seed=secrets.randbits(62))
    stop_token_ids = _token_ids(inputs, "stop_token_ids", tokenizer)
    if len(stop_token_ids) > MOST_STOP_IDS:
        raise RequestError(
            f"stop_token_ids has {len(stop_token_ids)} ids", f"Send at most {MOST_STOP_IDS}."
        )
    ignore_eos = _value(inputs, "ignore_eos", False)
    request = Request(
        prompt,
        # a chat ends by itself
        max_tokens=_value(inputs, "max_tokens", max(1, room if is_chat else min(MAX_TOKENS, room))),
        sampling=sampling,
        stop_ids=frozenset(stop_token_ids)
        | (frozenset() if ignore_eos else settings.eos_token_ids),
        priority=_value(inputs, "priority", 0),
        client=client,
        drafting=_value(inputs, "drafting", True),
    )
    check_request(request, settings.max_seq_len)
    if ids and echo:
        with panics_as_errors():
            text = tokenizer.decode(ids, skip_special_tokens=False)
    if sampling.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, max_tokens {request.max_tokens}",
            "Ask for at least as many tokens as must come.",
        )
    choices = [
        replace(request, sampling=replace(sampling, seed=(sampling.seed + i) % 2**63))
        for i in range(choices_asked(inputs))
    ]
    return Ask(choices, _value(inputs, "stream", False), text if echo else "", stop_words)


def _check_bytes(inputs: Inputs, most: int) -> None:
    """Before it is parsed: whether a prompt of so many characters can be in there.

    JSON has up to six bytes for a character, and names beside them.
    """
    size = sum(len(_value(inputs, name, b"")) for name in PROMPT_INPUTS)
    limit = min(PROMPT_BYTES, 6 * most + 2**16)
    if size > limit:
        raise RequestError(
            f"{', '.join(PROMPT_INPUTS)} are {size} bytes", f"Send at most {limit} in all."
        )


def _encode(tokenizer: Tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each. As a batch, since only that leaves other threads the interpreter."""
    with panics_as_errors():
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [each.ids for each in found]


def _prompt_text(inputs: Inputs, template: Render | None) -> tuple[str, bool]:
    """The prompt, and whether it comes from messages."""
    text, messages = _value(inputs, "text_input", b""), _value(inputs, "messages", b"")
    given = [name for name in ("text_input", "messages") if _value(inputs, name, b"")]
    given += ["input_ids"] if "input_ids" in inputs else []
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are both given", "Send one of them.")
    if not messages:
        return _decode("text_input", text), False
    if template is None:
        raise RequestError("This model's tokenizer has no chat template", "Send a plain prompt.")
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


def _token_ids(inputs: Inputs, name: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the vocabulary; RequestError names one that is not."""
    ids = inputs[name].ravel() if name in inputs else np.zeros(0, np.int32)
    most = _last_token(tokenizer)
    if (wrong := ids[(ids < 0) | (ids > most)]).size:
        raise RequestError(f"{name} holds {wrong[0]}, no token", f"Send ids of 0 to {most}.")
    return [int(token) for token in ids.tolist()]


@lru_cache(maxsize=1)
def _last_token(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values())


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
    if len(values) > MOST_WORDS:
        raise RequestError(f"{name} has {len(values)} words", f"Send at most {MOST_WORDS}.")
    if (size := sum(map(len, values))) > WORDS_BYTES:
        raise RequestError(f"{name} is {size} bytes", f"Send at most {WORDS_BYTES}.")
    words = tuple(_decode(name, value) for value in values)
    if not all(words):
        raise RequestError(f"{name} holds an empty string", "Leave it out.")
    if (longest := max(map(len, words), default=0)) > LONGEST_WORD:
        raise RequestError(
            f"{name} has a word of {longest} characters", f"Send at most {LONGEST_WORD} of each."
        )
    return words


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Their token ids, at the start of a text and after a space, as vLLM reads them."""
    found: dict[tuple[int, ...], None] = {}
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    ids = [tuple(each) for each in _encode(tokenizer, texts, add_special_tokens=False)]
    for plain, spaced in zip(ids[::2], ids[1::2], strict=True):
        found[plain] = None
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found[spaced] = None
    return tuple(ids for ids in found if ids)


def _decode(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8", "Encode it as UTF-8.") from error
