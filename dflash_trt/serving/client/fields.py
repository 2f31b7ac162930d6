"""The Triton request that says what a client asked for."""

import json
import struct
from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from dflash_trt.errors import RequestError
from dflash_trt.prompts import AnyPrompt
from dflash_trt.request_fields import FIELDS, Field

MODEL = "dflash"
FORMATS = {"BOOL": "<?", "INT32": "<i", "UINT64": "<Q", "FP32": "<f"}


def to_request(
    prompt: AnyPrompt, options: Mapping[str, Any], *, stream: bool
) -> service_pb2.ModelInferRequest:
    """A request with the tensors that were set, without its timeout.

    Raises TypeError for an unknown field and RequestError for a value that its tensor cannot hold.
    """
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    source = {_prompt_field(prompt): prompt}
    for name, value in {**source, **options, "stream": stream}.items():
        if name not in FIELDS:
            raise TypeError(f"unknown request field {name!r}")
        if value is None:
            continue
        field = FIELDS[name]
        try:
            shape, content = _tensor(field, value)
        except (AttributeError, TypeError, ValueError, OverflowError, struct.error) as error:
            raise RequestError(f"{name} is not acceptable: {error}", "Correct it") from error
        request.inputs.add(name=name, datatype=field.datatype, shape=shape)
        request.raw_input_contents.append(content)
    return request


def _prompt_field(prompt: AnyPrompt) -> str:
    if isinstance(prompt, str):
        return "text_input"
    return "input_ids" if prompt and isinstance(prompt[0], int) else "messages"


def _tensor(field: Field, value: Any) -> tuple[list[int], bytes]:
    """The shape and the bytes of a tensor."""
    if field.json_type:
        value = json.dumps(value, ensure_ascii=False)
    one = isinstance(value, str) or not field.is_list  # a text is a list of one
    values = [value] if one else value
    if field.datatype == "BYTES":
        texts = [text.encode() for text in values]
        return [len(texts)], b"".join(struct.pack("<I", len(text)) + text for text in texts)
    pack = struct.Struct(FORMATS[field.datatype]).pack
    return [len(values)], b"".join(pack(each) for each in values)
