"""Parsing of client requests from the public model's input tensors."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.chat import ChatModel, ChatPrompt
from dflash_trt.decoding import Grammar, Request, SamplingParams, check_request
from dflash_trt.errors import RequestError, panics_as_errors
from dflash_trt.json_schema import ascii_classes, without_annotations
from dflash_trt.request_schema import MAX_CHOICES, GenerateRequest, from_tensors
from dflash_trt.serving.keys import MEASURING_CLIENT
from dflash_trt.serving.model.output_processor import Detokenizer, Prefix
from dflash_trt.wire import Settings

FORMAT_FIELDS = {"name", "description", "schema", "strict"}
ANY_OBJECT = '{"type": "object"}'
MAX_TOKENS = 128  # if the client does not say and the prompt leaves room
PROMPT_INPUTS = ("text_input", "messages", "tools", "chat_template_kwargs", "tool_choice")
GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
MAX_PROMPT_BYTES = 2**22  # in all: JSON of this size takes 0.5 s to parse at worst
MAX_GRAMMAR_BYTES = 2**16  # per grammar
# plain values only: lists and objects, such as token ids, mean something else there
SAMPLING = [
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerateRequest.model_fields and not isinstance(field.default, tuple)
]
Tensors = Mapping[str, "np.ndarray[Any, Any]"]


def grammar_of(body: GenerateRequest) -> Grammar | None:
    """Return None for free text; RequestError for more than one grammar, or an invalid one."""
    grammars = []
    for name, read in READERS.items():
        if name not in body.model_fields_set:
            continue
        grammar = read(name, getattr(body, name))
        if grammar is not None:
            grammars.append(grammar)
    if len(grammars) > 1:
        names = " and ".join(grammar.name for grammar in grammars)
        raise RequestError(f"{names} are both given", "Send one of them.")
    return grammars[0] if grammars else None


def chat_grammar(sent: Grammar | None, prompt: ChatPrompt, model: ChatModel) -> Grammar | None:
    """Combine required or optional calls with `sent`; RequestError if that is impossible."""
    of_answer = sent and sent.name == "response_format"  # other grammars apply to the whole text
    if prompt.grammar and sent and not of_answer:
        raise RequestError(f"tool_choice and {sent.name} are both given", "Send one of them.")
    if prompt.grammar:
        return Grammar("lark", prompt.grammar, "tools")  # errors name a tool's schema
    if sent is None or not of_answer or not (prompt.tools or prompt.thinking):
        return sent
    return Grammar("lark", model.grammar(prompt, json.loads(sent.text)), sent.name)


def _response_format(name: str, value: dict[str, Any]) -> Grammar | None:
    """Accept a schema in the format itself too, as other servers do."""
    value = {field: content for field, content in value.items() if content is not None}
    kind = value.pop("type", None)
    inner = value
    unknown: set[str] = set()
    if kind == "json_schema" and isinstance(value.get("json_schema"), dict):
        inner = value.pop("json_schema")
        unknown |= value.keys()
    unknown |= {field for field, content in inner.items() if content is not None} - FORMAT_FIELDS
    if unknown:
        raise RequestError(f"{name} holds {min(unknown)[:40]!r}", "Leave it out.")
    schema = inner.get("schema")
    if schema is None and kind == "text":
        return None
    if schema is None and kind == "json_object":
        return Grammar("json_schema", ANY_OBJECT, name)
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict | bool):
        raise RequestError(
            f"response_format is of type {json.dumps(kind)[:40]} and lacks what that needs",
            'Send {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": {..}}}.',
        )
    return _schema(name, schema)


def _schema(name: str, schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(without_annotations(schema), ensure_ascii=False), name)


def _choice(name: str, texts: list[str]) -> Grammar:
    if not texts:
        raise RequestError(f"{name} is empty", "Send at least one text.")
    escaped = (re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text) for text in texts)
    return Grammar("regex", "|".join(escaped), name)


READERS: dict[str, Any] = {
    "response_format": _response_format,
    "guided_json": _schema,
    "guided_regex": lambda name, pattern: Grammar("regex", ascii_classes(pattern), name),
    "guided_choice": _choice,
    "guided_grammar": lambda name, text: Grammar("lark", text, name),
}


@dataclass(frozen=True)
class ParsedRequest:
    choices: list[Request]  # n
    streaming: bool
    prefix: Prefix
    stop_words: tuple[str, ...]
    hidden: frozenset[int]  # special tokens to leave out of the text
    thinking: bool  # see `Chunk`


def number_of_choices(tensors: Tensors, client_limit: int) -> int:
    """Return n; RequestError if it is out of range."""
    n = int(tensors["n"].ravel()[0]) if "n" in tensors else 1
    limit = min(client_limit, MAX_CHOICES)
    if not 1 <= n <= limit:
        raise RequestError(f"n is {n}", f"Ask for 1 to {limit} choices.")
    return n


def parse_request(
    tensors: Tensors,
    tokenizer: Tokenizer,
    chat_model: ChatModel,
    settings: Settings,
    client: str = "",
) -> ParsedRequest:
    """Raise RequestError, before it costs much time or memory, for what cannot run."""
    max_chars = settings.max_seq_len * _longest_token_chars(tokenizer)
    _check_size_before_parsing(tensors, max_chars)
    body = _with_defaults(from_tensors(tensors), settings)
    ids = _checked_token_ids("input_ids", body.input_ids or [], tokenizer)
    text, chat = _text_and_chat(body, chat_model)
    if len(text) > max_chars:
        raise RequestError(
            f"This model's maximum context length is {settings.max_seq_len} tokens: the prompt's "
            f"{len(text)} characters exceed it",
            "Shorten the prompt, or build with a larger serving.max_seq_len.",
        )
    prompt = _prompt_tokens(text, ids, tokenizer, is_chat=chat is not None)
    sampling = _sampling_params(body, tokenizer)
    stop_ids = frozenset(_checked_token_ids("stop_token_ids", body.stop_token_ids, tokenizer))
    if not body.ignore_eos:
        stop_ids |= settings.eos_token_ids
    grammar = grammar_of(body)
    if chat is not None:
        grammar = chat_grammar(grammar, chat, chat_model)
    request = Request(
        prompt,
        max_tokens=_max_tokens(body, settings, len(prompt), is_chat=chat is not None),
        sampling=sampling,
        stop_ids=stop_ids,
        priority=body.priority,
        drafting=body.drafting,
        always_drafts=client == MEASURING_CLIENT,
        cache_salt=body.cache_salt,
        grammar=grammar,
    )
    check_request(request, settings.max_seq_len)
    if sampling.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, max_tokens {request.max_tokens}",
            "Ask for at least as many tokens as must come.",
        )
    choices = [
        replace(request, sampling=replace(sampling, seed=(sampling.seed + i) % 2**63))
        for i in range(body.n)
    ]
    return ParsedRequest(
        choices,
        body.stream,
        _prefix(body, text, request, tokenizer, is_chat=chat is not None),
        tuple(body.stop_words),
        chat_model.hidden if chat is None else chat.hidden,
        thinking=chat is not None and bool(chat.thinking),
    )


def _prompt_tokens(text: str, ids: list[int], tokenizer: Tokenizer, *, is_chat: bool) -> list[int]:
    prompt = ids
    if text:  # a chat template writes the special tokens itself
        [prompt] = _encode(tokenizer, [text], add_special_tokens=not is_chat)
    if not prompt:
        raise RequestError("The prompt is empty", "Send at least one token of text.")
    return prompt


def _prefix(
    body: GenerateRequest, text: str, request: Request, tokenizer: Tokenizer, *, is_chat: bool
) -> Prefix:
    """Return what the answer is decoded behind; in a chat it is a text of its own.

    It is none where it continues a message, or where a grammar counts each character.
    """
    continues = not is_chat or body.continue_final_message or request.grammar is not None
    tokens = request.prompt if continues else ()
    if body.exclude_input_in_output:
        return Prefix("", tokens)
    if body.input_ids:  # the answer completes a character that they do not
        text = Detokenizer(tokenizer, frozenset()).push(body.input_ids)
    return Prefix(text, tokens)


def _with_defaults(body: GenerateRequest, settings: Settings) -> GenerateRequest:
    """Return the fields with the server's defaults, but for max_tokens."""
    names = settings.sampling.keys() - body.model_fields_set - {"max_tokens"}
    return body.model_copy(update={name: settings.sampling[name] for name in names})


def _max_tokens(
    body: GenerateRequest, settings: Settings, prompt_tokens: int, *, is_chat: bool
) -> int:
    if body.max_tokens is not None:
        return body.max_tokens
    room = settings.max_seq_len - prompt_tokens
    default = room if is_chat else MAX_TOKENS  # a chat ends by itself
    limit = int(settings.sampling.get("max_tokens", default))
    return max(1, min(limit, room))


def _sampling_params(body: GenerateRequest, tokenizer: Tokenizer) -> SamplingParams:
    values = {name: getattr(body, name) for name in SAMPLING}
    if body.seed is None:
        values["seed"] = secrets.randbits(62) if body.temperature else 0
    return SamplingParams(
        **values,
        bad_words=_bad_words(body.bad_words, tokenizer),
        logit_bias=_id_biases(body.logit_bias, tokenizer),
        prompt_logprobs=not body.exclude_input_in_output and body.logprobs is not None,
    )


def _check_size_before_parsing(tensors: Tensors, max_chars: int) -> None:
    def size(name: str) -> int:
        return sum(map(len, tensors[name].ravel().tolist())) if name in tensors else 0

    limit = min(MAX_PROMPT_BYTES, 6 * max_chars + 2**16)  # JSON: 6 bytes a character, and names
    total = sum(map(size, PROMPT_INPUTS))
    if total > limit:
        raise RequestError(
            f"{', '.join(PROMPT_INPUTS)} are {total} bytes", f"Send at most {limit} in all."
        )
    for name in GRAMMARS:
        if size(name) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"{name} is {size(name)} bytes", f"Send at most {MAX_GRAMMAR_BYTES}."
            )


def _encode(tokenizer: Tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of each text; a batch call releases the GIL."""
    with panics_as_errors():
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [encoding.ids for encoding in encodings]


def _text_and_chat(body: GenerateRequest, chat_model: ChatModel) -> tuple[str, ChatPrompt | None]:
    sent = body.model_fields_set
    prompts = []
    if body.text_input:
        prompts.append("text_input")
    if body.messages:
        prompts.append("messages")
    if "input_ids" in sent:
        prompts.append("input_ids")
    if len(prompts) > 1:
        raise RequestError(f"{' and '.join(prompts)} are both given", "Send one of them.")
    if "messages" not in sent or prompts not in ([], ["messages"]):
        return body.text_input, None
    chat = chat_model.prompt(
        body.messages,
        body.tools,
        body.tool_choice,
        parallel=body.parallel_tool_calls,
        continue_final_message=body.continue_final_message,
        template_values={
            **body.chat_template_kwargs,
            "add_generation_prompt": body.add_generation_prompt,
        },
    )
    return chat.text, chat


def _checked_token_ids(name: str, ids: list[int], tokenizer: Tokenizer) -> list[int]:
    last = _last_token_id(tokenizer)
    if ids and not 0 <= min(ids) <= max(ids) <= last:
        wrong = next(token for token in ids if not 0 <= token <= last)
        raise RequestError(f"{name} holds {wrong}, no token", f"Send ids of 0 to {last}.")
    return ids


def _id_biases(biases: Mapping[str, float], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    last = _last_token_id(tokenizer)
    for token in biases:
        if not (re.fullmatch("[0-9]{1,9}", token) and int(token) <= last):
            raise RequestError(
                f"logit_bias holds {token[:40]!r}, no token", f"Send ids of 0 to {last}."
            )
    return tuple((int(token), float(bias)) for token, bias in biases.items())


@lru_cache(maxsize=1)
def _last_token_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values())


@lru_cache(maxsize=1)
def _longest_token_chars(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return token ids of words, at a text's start and after a space, as vLLM does."""
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    ids = [tuple(sequence) for sequence in _encode(tokenizer, texts, add_special_tokens=False)]
    banned = []
    for plain, spaced in zip(ids[::2], ids[1::2], strict=True):
        banned.append(plain)
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            banned.append(spaced)
    return tuple(sequence for sequence in dict.fromkeys(banned) if sequence)
