"""A client's request, read from the input tensors of the public model."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.build.settings import Settings
from dflash_trt.chat import ChatModel, ChatPrompt, parse_json, parse_messages
from dflash_trt.decoding import Grammar, Request, SamplingParams, check_request
from dflash_trt.errors import RequestError
from dflash_trt.panics import panics_as_errors
from dflash_trt.request_fields import FIELDS, MAX_CHOICES
from dflash_trt.serving.front.inputs import Inputs, Tensors
from dflash_trt.serving.front.structured import grammar_of
from dflash_trt.serving.internal import PROOF

MAX_TOKENS = 128  # when the client does not say and the prompt leaves room
MAX_WORD = 256  # characters of a stop word or bad word
TOOL_CHOICES = ("none", "auto", "required")  # need no quotes
PROMPT_INPUTS = ("text_input", "messages", "tools", "chat_template_kwargs", "tool_choice")
MAX_BIASES = 1024  # tokens
MAX_PROMPT_BYTES = 2**22  # of these together: 0.5 s to parse what JSON takes longest for
# the plain values: lists and JSON mean something else there, such as token ids
SAMPLING = [
    each.name
    for each in fields(SamplingParams)
    if (known := FIELDS.get(each.name)) and not known.is_list and not known.json_type
]


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request: a decoding request for each of its n choices."""

    choices: list[Request]
    streaming: bool
    prefix: str  # the text starts with it: the prompt, or nothing
    stop_words: tuple[str, ...]
    hidden: frozenset[int]  # special tokens that are no text
    thinking: bool  # see `RequestOutput`


def number_of_choices(tensors: Tensors, most: int = MAX_CHOICES) -> int:
    """n; RequestError when there cannot be so many.

    most: sequences that one client can have at all.
    """
    n, most = Inputs(tensors)["n"], min(most, MAX_CHOICES)
    if not 1 <= n <= most:
        raise RequestError(f"n is {n}", f"Ask for 1 to {most} choices.")
    return int(n)


def parse_request(
    tensors: Tensors,
    tokenizer: Tokenizer,
    chat_model: ChatModel,
    settings: Settings,
    client: str = "",
) -> ParsedRequest:
    """Raises `RequestError` for anything that cannot be run, before it takes long or much memory.

    client: who asks.
    """
    inputs = Inputs(tensors)
    max_chars = settings.max_seq_len * _longest_token(tokenizer)
    _check_size(inputs, max_chars)
    stop_words = _words(inputs, "stop_words")
    ids = _token_ids(inputs, "input_ids", tokenizer)
    text, chat = _prompt_text(inputs, chat_model)
    if len(text) > max_chars:
        raise RequestError(
            f"This model's maximum context length is {settings.max_seq_len} tokens: the prompt's "
            f"{len(text)} characters exceed it",
            "Shorten the prompt, or build with a larger serving.max_seq_len.",
        )
    # a chat template writes the special tokens itself
    prompt = _encode(tokenizer, [text], add_special_tokens=chat is None)[0] if text else ids
    if not prompt:
        raise RequestError("The prompt is empty", "Send at least one token of text.")
    echo = not inputs["exclude_input_in_output"]
    sampling = _sampling_params(inputs, tokenizer, prompt_logprobs=echo and "logprobs" in inputs)
    stop_ids = frozenset(_token_ids(inputs, "stop_token_ids", tokenizer))
    room = settings.max_seq_len - len(prompt)
    max_tokens = inputs["max_tokens"]
    if max_tokens is None:  # a chat ends by itself
        max_tokens = max(1, room if chat else min(MAX_TOKENS, room))
    request = Request(
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=stop_ids if inputs["ignore_eos"] else stop_ids | settings.eos_token_ids,
        priority=inputs["priority"],
        client=client,
        drafting=inputs["drafting"],
        always_drafts=client == PROOF,
        cache_salt=inputs["cache_salt"],
        grammar=_grammar(inputs, chat),
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
        for i in range(number_of_choices(tensors))
    ]
    return ParsedRequest(
        choices,
        inputs["stream"],
        text if echo else "",
        stop_words,
        chat.hidden if chat else chat_model.hidden,
        thinking=bool(chat and chat.thinking),
    )


def _sampling_params(inputs: Inputs, tokenizer: Tokenizer, prompt_logprobs: bool) -> SamplingParams:
    """A random seed where one matters and none was sent."""
    given = {name: inputs[name] for name in SAMPLING if name in inputs}
    bad_words = _bad_words(_words(inputs, "bad_words"), tokenizer)
    logit_bias = _logit_bias(inputs.json("logit_bias"), tokenizer)
    sampling = SamplingParams(
        **given, bad_words=bad_words, logit_bias=logit_bias, prompt_logprobs=prompt_logprobs
    )
    if "seed" not in inputs and sampling.temperature:
        return replace(sampling, seed=secrets.randbits(62))
    return sampling


def _check_size(inputs: Inputs, max_chars: int) -> None:
    """Before it is parsed: whether a prompt of so many characters can be in there.

    JSON has up to six bytes for a character, and names beside them.
    """
    size = sum(map(inputs.size, PROMPT_INPUTS))
    limit = min(MAX_PROMPT_BYTES, 6 * max_chars + 2**16)
    if size > limit:
        raise RequestError(
            f"{', '.join(PROMPT_INPUTS)} are {size} bytes", f"Send at most {limit} in all."
        )


def _encode(tokenizer: Tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each. As a batch, since only that leaves other threads the interpreter."""
    with panics_as_errors():
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [each.ids for each in found]


def _prompt_text(inputs: Inputs, chat_model: ChatModel) -> tuple[str, ChatPrompt | None]:
    """The prompt, and that of messages if there are some; "" where it is token ids."""
    given = [name for name in ("text_input", "messages") if inputs[name]]
    given += ["input_ids"] if "input_ids" in inputs else []
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are both given", "Send one of them.")
    if "messages" not in given:
        return inputs["text_input"] or "", None
    choice = inputs["tool_choice"]
    chat = chat_model.prompt(
        parse_messages(inputs["messages"]),
        inputs.json("tools"),
        choice if choice in TOOL_CHOICES else parse_json("tool_choice", choice, object),
        parallel=inputs["parallel_tool_calls"],
        template_values={
            **inputs.json("chat_template_kwargs"),
            "add_generation_prompt": inputs["add_generation_prompt"],
        },
    )
    return chat.text, chat


def _token_ids(inputs: Inputs, name: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the vocabulary; RequestError names one that is not."""
    last, ids = _last_token(tokenizer), [*inputs[name]]
    if ids and not 0 <= min(ids) <= max(ids) <= last:
        wrong = next(token for token in ids if not 0 <= token <= last)
        raise RequestError(f"{name} holds {wrong}, no token", f"Send ids of 0 to {last}.")
    return ids


def _grammar(inputs: Inputs, chat: ChatPrompt | None) -> Grammar | None:
    """That of the calls which tool_choice asks for, or what the client sent."""
    asked = grammar_of(inputs)
    if chat is None or not chat.grammar:
        return asked
    if asked:
        raise RequestError(f"tool_choice and {asked.name} are both given", "Send one of them.")
    return Grammar("lark", chat.grammar, "tools")  # an error is of a schema in them


def _logit_bias(given: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """By token id, as OpenAI's API has it."""
    last = _last_token(tokenizer)
    if len(given) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(given)} tokens", f"Send at most {MAX_BIASES}.")
    found = {}
    for token, bias in given.items():
        if not (re.fullmatch("[0-9]{1,9}", token) and int(token) <= last):
            raise RequestError(
                f"logit_bias holds {token[:40]!r}, no token", f"Send ids of 0 to {last}."
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise RequestError(f"logit_bias of {token} is {str(bias)[:40]}", "Give -100 to 100.")
        found[int(token)] = float(bias)
    return tuple(found.items())


@lru_cache(maxsize=1)
def _last_token(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values())


@lru_cache(maxsize=1)
def _longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token: longer texts are refused without tokenizing them."""
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _words(inputs: Inputs, name: str) -> tuple[str, ...]:
    words = tuple(inputs[name])
    if not all(words):
        raise RequestError(f"{name} holds an empty string", "Leave it out.")
    if (longest := max(map(len, words), default=0)) > MAX_WORD:
        raise RequestError(
            f"{name} has a word of {longest} characters", f"Send at most {MAX_WORD} of each."
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
