"""What a request may say, and the Triton request that says it."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tritonclient.grpc import service_pb2

from dflash_trt.errors import RequestError
from dflash_trt.prompts import AnyPrompt

MODEL = "dflash"


class Options(TypedDict, total=False):
    """The fields of a request; one that is left out or None has the server's default."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None  # 0: greedy, the default
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop_words: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    ignore_eos: bool | None
    drafting: bool | None  # False: plain decoding, to compare with
    logprobs: int | None  # alternatives given with each token, 0 to 20
    exclude_input_in_output: bool | None
    n: int | None  # choices
    priority: int | None  # lower is served first
    tools: Sequence[Mapping[str, Any]] | None  # for the chat template, as the next two
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    timeout: float | None  # seconds, more than 0; 600
    parameters: Mapping[str, str] | None  # request parameters of Triton's, beside the tensors


DATATYPES = {
    "text_input": "BYTES",
    "input_ids": "INT32",
    "messages": "BYTES",
    "tools": "BYTES",
    "chat_template_kwargs": "BYTES",
    "add_generation_prompt": "BOOL",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "stream": "BOOL",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "stop_token_ids": "INT32",
    "bad_words": "BYTES",
    "ignore_eos": "BOOL",
    "drafting": "BOOL",
    "logprobs": "INT32",
    "exclude_input_in_output": "BOOL",
    "n": "INT32",
    "priority": "INT32",
}
FORMATS = {"BOOL": "<?", "INT32": "<i", "UINT64": "<Q", "FP32": "<f"}
LISTS = {"input_ids", "stop_words", "stop_token_ids", "bad_words"}
JSON_FIELDS = {"messages", "tools", "chat_template_kwargs"}


def to_request(
    prompt: AnyPrompt, options: Mapping[str, Any], *, stream: bool
) -> service_pb2.ModelInferRequest:
    """A request with the tensors that were set, without its timeout.

    Raises TypeError for an unknown field and RequestError for a value that its tensor cannot hold.
    """
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    source = {_kind(prompt): prompt}
    for name, value in {**source, **options, "stream": stream}.items():
        if name not in DATATYPES:
            raise TypeError(f"unknown request field {name!r}")
        if value is None:
            continue
        try:
            shape, content = _tensor(name, value)
        except (AttributeError, TypeError, ValueError, OverflowError, struct.error) as error:
            raise RequestError(f"{name} is not acceptable: {error}", "Correct it") from error
        request.inputs.add(name=name, datatype=DATATYPES[name], shape=shape)
        request.raw_input_contents.append(content)
    return request


def _kind(prompt: AnyPrompt) -> str:
    if isinstance(prompt, str):
        return "text_input"
    return "input_ids" if prompt and isinstance(prompt[0], int) else "messages"


def _tensor(name: str, value: Any) -> tuple[list[int], bytes]:
    """The shape and the bytes of a tensor; a list of texts or ids, or one value."""
    datatype = DATATYPES[name]
    if datatype != "BYTES":
        values = value if name in LISTS else [value]
        return [len(values)], b"".join(struct.pack(FORMATS[datatype], each) for each in values)
    if name in JSON_FIELDS:
        value = json.dumps(value, ensure_ascii=False)
    texts = [text.encode() for text in ([value] if isinstance(value, str) else value)]
    return [len(texts)], b"".join(struct.pack("<I", len(text)) + text for text in texts)
