"""Fields of requests: one schema, from which all other forms are derived.

`tensors` are the inputs of the Triton models (`scripts/public_tensors.py` writes them into
config.pbtxt), `from_tensors` reads them, our client writes them, and OpenAI's API
(`serving/http/fields.py`) has the fields of the base classes. A field that is null or not sent has
its default.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from dflash_trt.errors import RequestError
from dflash_trt.files import parse_json

MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_WORD = 256  # characters of a stop word or bad word
MAX_TEXTS = 2**14  # characters of a list of texts
MAX_TOOLS = 1024  # OpenAI takes 128
TOOL_CHOICES = ("none", "auto", "required")  # need no quotes in a tensor
OWN_FIELDS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
# tensorrtllm_backend's fields, with neutral values; None: any value
UNUSED = {"pad_id": None, "end_id": None, "beam_width": 1, "length_penalty": 1, "len_penalty": 1}
UNUSED |= dict.fromkeys(("return_log_probs", "return_context_logits", "early_stopping"), False)
# request parameters of Triton's protocol and its clients that are taken
TRITON_PARAMETERS = {
    *("id", "timeout", "priority", "binary_data_output", "triton_enable_empty_final_response"),
    *("sequence_id", "sequence_start", "sequence_end", "headers"),
}
JSON = "JSON"  # a tensor of BYTES with a JSON document
T = TypeVar("T")


class FirstFault(FailFast):
    """Stops at the first fault: a report of a million takes 10 s and 2 GB."""

    __hash__ = object.__hash__  # required in a union


def _check_total_length(texts: list[str]) -> list[str]:
    if sum(map(len, texts)) > MAX_TEXTS:
        raise ValueError(f"must have at most {MAX_TEXTS} characters in all")
    return texts


def _check_int32(value: int) -> int:
    if not -(2**31) <= value < 2**31:
        raise ValueError("must be an integer of 32 bits")
    return value


def _refuse_own_fields(values: dict[str, Any]) -> dict[str, Any]:
    doubled = values.keys() & OWN_FIELDS
    if doubled:
        raise ValueError(f"must not hold {min(doubled)}, which is a field of its own")
    return values


class WithTensorRTLLM(Enum):
    """What becomes of a field where TensorRT-LLM decodes; an annotation of each."""

    PASSED = "its SamplingParams has it, by this name"
    PENALTY = "likewise, if the build enables penalties"
    REFUSED = "it does not have it with a drafter"
    HERE = "read before it, or by `serving/model/llm.py`"


PASSED, PENALTY = WithTensorRTLLM.PASSED, WithTensorRTLLM.PENALTY
REFUSED, HERE = WithTensorRTLLM.REFUSED, WithTensorRTLLM.HERE
# the string in an annotation is the tensor's data type
Many = Annotated[list[T], FirstFault()]
Text = Annotated[str, "BYTES"]
Int32 = Annotated[int, AfterValidator(_check_int32)]
Integer = Annotated[Int32, "INT32"]
Number = Annotated[float, Field(allow_inf_nan=False), "FP32"]
Switch = Annotated[bool, "BOOL"]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD)]
Words = Annotated[list[Word], FirstFault(), Field(max_length=64), "BYTES"]
Texts = Annotated[list[str], FirstFault(), AfterValidator(_check_total_length), "BYTES"]
Ids = Annotated[list[Int32], FirstFault(), "INT32"]
Object = Annotated[dict[str, Any], JSON]
Objects = Annotated[list[dict[str, Any]], FirstFault(), JSON]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024), JSON
]


class Schema(BaseModel):
    """Base of requests. Values keep their types: "5" is no number, 1 is not true."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class Sampling(Schema):
    """Fields common to all APIs."""

    max_tokens: Annotated[Integer | None, HERE] = Field(
        None,
        description="most tokens to generate; 128, or with messages as many as there is room for",
    )
    min_tokens: Annotated[Integer, REFUSED] = Field(
        0, ge=0, description="no end of text and no stop word before"
    )
    temperature: Annotated[Number, HERE] = Field(0.0, ge=0, description="0 = greedy")
    top_k: Annotated[Integer, PASSED] = Field(0, ge=0, description="0 = all tokens")
    top_p: Annotated[Number, PASSED] = Field(
        1.0, gt=0, le=1, description="sum of the likeliest tokens' probabilities"
    )
    min_p: Annotated[Number, REFUSED] = Field(
        0.0, ge=0, le=1, description="share of the best token's probability"
    )
    repetition_penalty: Annotated[Number, PENALTY] = Field(
        1.0, gt=0, description="of tokens in prompt and output"
    )
    presence_penalty: Annotated[Number, PENALTY] = Field(0.0, description="of tokens in the output")
    frequency_penalty: Annotated[Number, PENALTY] = Field(
        0.0, description="each time that one is there"
    )
    seed: Annotated[Annotated[int, "UINT64"] | None, PASSED] = Field(
        None, ge=0, lt=2**63, description="unset: another text each time; choice i has seed + i"
    )
    stop_token_ids: Annotated[Ids, HERE] = Field(
        [],
        max_length=64,
        description="the text ends before the first of them, as before an end-of-text token",
    )
    bad_words: Annotated[Words, REFUSED] = Field([], description="never generated")
    logit_bias: Annotated[Biases, REFUSED] = Field(
        {}, description="a JSON object: token ids, and -100 to 100 that is added to their logits"
    )
    response_format: Annotated[Object | None, HERE] = Field(
        None,
        description="a JSON object as OpenAI has it: type text, json_object or json_schema; or:",
    )
    guided_json: Annotated[Object | None, HERE] = Field(None, description="a JSON schema; or:")
    guided_regex: Annotated[Text | None, HERE] = Field(
        None, description="a regular expression; or:"
    )
    guided_choice: Annotated[Texts, HERE] = Field(
        [], max_length=256, description="the text is one of them; or:"
    )
    guided_grammar: Annotated[Text | None, HERE] = Field(
        None, description="a grammar, llguidance's Lark"
    )
    ignore_eos: Annotated[Switch, HERE] = Field(
        False, description="go on after an end-of-text token"
    )
    drafting: Annotated[Switch, HERE] = Field(
        True, description="false: plain decoding, which tensorrt_llm refuses where it drafts"
    )
    cache_salt: Annotated[Text, HERE] = Field(
        "", description="KV cache of earlier texts is reused among requests of the same one alone"
    )
    priority: Annotated[Integer, HERE] = Field(0, description="lower is served first")


class ChatTemplate(Schema):
    """Fields for a chat template, beside the messages."""

    tools: Annotated[Objects, HERE] = Field(
        [], max_length=MAX_TOOLS, description="a JSON list, for the chat template"
    )
    tool_choice: Annotated[str | dict[str, Any], JSON, HERE] = Field(
        "auto",
        description='none, auto, required, or as JSON {"type": "function", "function": '
        '{"name": ..}}',
    )
    parallel_tool_calls: Annotated[Switch, HERE] = Field(
        True, description="with tool_choice required: there may be several calls"
    )
    chat_template_kwargs: Annotated[Object, AfterValidator(_refuse_own_fields), HERE] = Field(
        {}, description="a JSON object, for the chat template"
    )
    add_generation_prompt: Annotated[Switch, HERE] = Field(
        True, description="the chat template begins the answer"
    )
    continue_final_message: Annotated[Switch, HERE] = Field(
        False,
        description="with add_generation_prompt false: the answer goes on with the last message",
    )


class GenerateRequest(ChatTemplate, Sampling):
    """A request of the public Triton models."""

    text_input: Annotated[Text, HERE] = Field("", description="the prompt as it is; or:")
    input_ids: Annotated[Ids | None, HERE] = Field(None, description="the prompt as token ids; or:")
    messages: Annotated[Objects, HERE] = Field(
        [], description="a JSON list, for the tokenizer's chat template"
    )
    stream: Annotated[Switch, HERE] = Field(
        False, description="false: one response with all the text"
    )
    stop_words: Annotated[Words, HERE] = Field(
        [], description="the text ends before the first of them"
    )
    include_drafting: Annotated[Switch, HERE] = Field(
        False, description="true: report who wrote each token, and what rounds proposed"
    )
    logprobs: Annotated[Integer | None, REFUSED] = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="report log-probabilities, and so many of the best alternatives; unset: none",
    )
    exclude_input_in_output: Annotated[Switch, HERE] = Field(
        True,
        description="false: the text starts with the prompt, with logprobs its tokens too (and "
        "max_tokens may be 0)",
    )
    n: Annotated[Integer, HERE] = Field(1, ge=1, le=MAX_CHOICES, description="choices")


class Accepted(NamedTuple):
    """What a tensor of a data type holds."""

    kind: Any  # a type or union
    words: str
    dtype: str = ""  # of NumPy; texts have none
    low: float = 0
    high: float = 0

    def takes(self, value: Any) -> bool:
        if not isinstance(value, self.kind) or isinstance(value, bool) != (self.kind is bool):
            return False
        return self.kind is str or self.low <= value <= self.high


ACCEPTED = {
    "BYTES": Accepted(str, "a string"),
    "BOOL": Accepted(bool, "true or false", "?", 0, 1),
    "INT32": Accepted(int, "an integer of 32 bits", "<i4", -(2**31), 2**31 - 1),
    "UINT64": Accepted(int, "an integer from 0 on", "<u8", 0, 2**64 - 1),
    "FP32": Accepted(int | float, "a number", "<f4", -math.inf, math.inf),
}


@dataclass(frozen=True)
class Tensor:
    datatype: str  # BYTES, INT32, ..
    is_list: bool  # of shape [-1], otherwise [1]
    is_json: bool
    help: str


@cache
def tensors() -> dict[str, Tensor]:
    return {name: _tensor_of(field) for name, field in GenerateRequest.model_fields.items()}


def _tensor_of(field: FieldInfo) -> Tensor:
    annotations = [field.annotation, *getattr(field.annotation, "__args__", ())]  # of a union
    marks = list(field.metadata)
    types = []
    for annotation in annotations:
        marks += getattr(annotation, "__metadata__", ())
        bare = getattr(annotation, "__origin__", annotation)  # of Annotated, or of a list
        types += [bare, get_origin(bare)]
    [datatype] = [mark for mark in marks if isinstance(mark, str)]
    is_json = datatype == JSON
    default = ""
    if field.default not in (None, "", [], {}):
        default = f"; {field.default}".lower().removesuffix(".0")
    return Tensor(
        datatype="BYTES" if is_json else datatype,
        is_list=list in types and not is_json,
        is_json=is_json,
        help=f"{field.description}{default}",
    )


def fields_with_tensorrt_llm(*kinds: WithTensorRTLLM) -> list[str]:
    """Return the fields of these kinds; ValueError for a field that does not say its own."""
    chosen = []
    for name, field in GenerateRequest.model_fields.items():
        [kind] = [mark for mark in field.metadata if isinstance(mark, WithTensorRTLLM)]
        if kind in kinds:
            chosen.append(name)
    return chosen


def from_tensors(arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> GenerateRequest:
    """Return the request in input tensors; RequestError names the first invalid one."""
    values = {name: _value_of(name, array) for name, array in arrays.items()}
    try:
        return GenerateRequest.model_validate(values)
    except ValidationError as error:
        name, problem = first_fault(error.errors())
        raise RequestError(f"{name} {problem}", "Correct it.") from None


def check_names(names: Mapping[str, Any]) -> None:
    """Raise RequestError for parameters that look like fields, which Triton would ignore."""
    for name, value in names.items():
        if name not in UNUSED or UNUSED[name] not in (None, value):
            raise RequestError(f"{name[:40]!r} is no field of this request", "Leave it out")


def check_fits(name: str, value: Any) -> None:
    """Raise RequestError for a value that the tensor of this name cannot hold."""
    tensor = tensors()[name]
    accepted = ACCEPTED[tensor.datatype]
    elements = value if isinstance(value, list) else [value]
    for index, element in enumerate(elements):
        if not accepted.takes(element):
            place = f"{name}[{index}]" if tensor.is_list else name
            raise RequestError(f"{place} is not {accepted.words}", "Correct it")


def first_fault(faults: Sequence[Any]) -> tuple[str, str]:
    """Return the path of the first invalid value, and the problem: "must be a valid string".

    faults: as listed by `ValidationError.errors`.
    """
    fault = faults[0]
    path = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isdecimal():  # a token id
            path += f".{part}"
        elif part.isidentifier() and part not in ("str", "int", "float"):  # no branch of a union
            path += f".{part}" if path else part
    words = str(fault["msg"]).removeprefix("Value error, ").split(", unable to parse")[0]
    if fault["type"] == "extra_forbidden":
        return path[:80], "is unknown"
    words = re.sub(r"^[A-Z]\w+ should| after validation, not \d+$", "", words).strip()
    if not words.startswith(("must", "is")):
        words = f"must {words}"
    value = fault["input"]
    if isinstance(value, int | float):
        words = f"is {str(value)[:40]} and {words}"
    return path[:80], words


def _value_of(name: str, array: "np.ndarray[Any, Any]") -> Any:
    tensor = tensors()[name]
    values = array.ravel().tolist()
    if tensor.datatype == "BYTES":
        try:
            values = [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise RequestError(f"{name} is not UTF-8", "Encode it as UTF-8.") from error
    if name in ("stop_words", "bad_words"):  # empty ones are ignored, as in tensorrtllm_backend
        return [word for word in values if word]
    if tensor.is_list:
        return values
    if len(values) != 1:
        raise RequestError(f"{name} has {len(values)} elements", "Send one.")
    if tensor.is_json and not values[0]:
        return None
    if not tensor.is_json or values[0] in TOOL_CHOICES:
        return values[0]
    try:
        return parse_json(values[0])
    except ValueError as error:
        raise RequestError(f"{name} is not JSON ({error})", "Send it as a JSON string.") from error


def encode(name: str, value: Any) -> tuple[str, list[int], bytes]:
    """Return the data type, shape and bytes of the tensor for a field's value.

    Raises RequestError for a value that the tensor cannot hold; what else is wrong with it the
    model says.
    """
    tensor = tensors().get(name)
    if tensor is None:
        raise RequestError(f"{name[:80]} is unknown", "Leave it out")
    if not tensor.is_json:
        if isinstance(value, list) != tensor.is_list:
            raise RequestError(f"{name} is {'no' if tensor.is_list else 'a'} list", "Correct it")
        check_fits(name, value)
    elif value not in TOOL_CHOICES:
        value = json.dumps(value, ensure_ascii=False)
    values = value if tensor.is_list else [value]
    if tensor.datatype == "BYTES":
        texts = [text.encode() for text in values]
        content = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    else:
        content = np.array(values, ACCEPTED[tensor.datatype].dtype).tobytes()
    return tensor.datatype, [len(values)], content
