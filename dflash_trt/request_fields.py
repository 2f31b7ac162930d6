"""The fields of a request, each in one place: what a client may say, and the tensor that says it.

Read by our client (`Options` are its arguments), the OpenAI front, the gateway, the request handler
and `SamplingParams`; `scripts/public_tensors.py` writes them into the models' config.pbtxt. A new
option is an entry here, and its meaning where it takes effect.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

MAX_CHOICES = 64
MAX_LOGPROBS = 20
DATATYPE_OF = {str: "BYTES", int: "INT32", float: "FP32", bool: "BOOL"}


@dataclass(frozen=True)
class Field:
    """An input tensor of the public models.

    Its annotation is what a client gives: a str, int, float or bool has shape `[1]`, a sequence of
    them `[-1]`, and anything else travels as JSON, a string of shape `[1]`.
    """

    help: str
    default: Any = None  # the server's; None: as `help` says
    allowed: str = ""  # its values in words, for errors
    accepts: Callable[[Any], bool] = lambda value: True  # whether a value is one of them
    max_items: int | None = None  # of a list
    # which of its APIs the OpenAI front takes it in, by the same name
    openai: Literal["both", "chat", ""] = "both"
    datatype: str = ""  # Triton's; "": that of the annotation
    name: str = ""  # this and the next are filled in from the table
    kind: Any = None  # the annotation, without None

    @property
    def is_list(self) -> bool:
        """Whether its shape is `[-1]`."""
        return get_origin(self.kind) is Sequence and get_args(self.kind)[0] in DATATYPE_OF

    @property
    def json_type(self) -> type | None:
        """What the JSON must be that it travels as; None: it does not."""
        if self.is_list or self.kind in DATATYPE_OF:
            return None
        return {Sequence: list, Mapping: dict}.get(get_origin(self.kind), object)


class Prompt(TypedDict, total=False):
    """The prompt in one of three forms, and how its answer comes: what a client's call says."""

    text_input: Annotated[str, Field("the prompt as it is; or:", openai="")]
    input_ids: Annotated[Sequence[int], Field("the prompt as token ids; or:", (), openai="")]
    messages: Annotated[
        Sequence[Mapping[str, Any]],
        Field("a JSON list, for the tokenizer's chat template", openai=""),
    ]
    stream: Annotated[bool, Field("false: one response with all the text", False, openai="")]


class Options(TypedDict, total=False):
    """The options of a request; one that is left out or None has the server's default."""

    tools: Annotated[
        Sequence[Mapping[str, Any]] | None,
        Field("a JSON list, for the chat template", openai="chat"),
    ]
    tool_choice: Annotated[
        str | Mapping[str, Any] | None,
        Field(
            'none, auto, required, or as JSON {"type": "function", "function": {"name": ..}}',
            "auto",
            openai="chat",
        ),
    ]
    parallel_tool_calls: Annotated[
        bool | None,
        Field("with tool_choice required: there may be several calls", True, openai="chat"),
    ]
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, Field("a JSON object, for the chat template", openai="chat")
    ]
    add_generation_prompt: Annotated[
        bool | None, Field("the chat template begins the answer", True, openai="chat")
    ]
    max_tokens: Annotated[
        int | None,
        Field("most tokens to generate; 128, or with messages as many as there is room for"),
    ]
    min_tokens: Annotated[
        int | None,
        Field("no end of text and no stop word before", 0, "0 or more", lambda x: x >= 0),
    ]
    temperature: Annotated[
        float | None, Field("0 = greedy", 0.0, "0 (greedy) or more", lambda x: 0 <= x < math.inf)
    ]
    top_k: Annotated[int | None, Field("0 = all tokens", 0, "0 (off) or more", lambda x: x >= 0)]
    top_p: Annotated[
        float | None,
        Field(
            "sum of the likeliest tokens' probabilities",
            1.0,
            "more than 0, at most 1 (off)",
            lambda x: 0 < x <= 1,
        ),
    ]
    min_p: Annotated[
        float | None,
        Field("share of the best token's probability", 0.0, "0 (off) to 1", lambda x: 0 <= x <= 1),
    ]
    repetition_penalty: Annotated[
        float | None,
        Field("of tokens in prompt and output", 1.0, "above 0", lambda x: 0 < x < math.inf),
    ]
    presence_penalty: Annotated[
        float | None,
        Field("of tokens in the output", 0.0, "a number", lambda x: abs(x) < math.inf),
    ]
    frequency_penalty: Annotated[
        float | None,
        Field("each time that one is there", 0.0, "a number", lambda x: abs(x) < math.inf),
    ]
    seed: Annotated[
        int | None,
        Field(
            "unset: another text each time; choice i has seed + i",
            allowed="an integer from 0 to 2^63 - 1",
            accepts=lambda x: 0 <= x < 2**63,
            datatype="UINT64",
        ),
    ]
    stop_words: Annotated[
        Sequence[str] | None,
        Field("the text ends before the first of them", (), max_items=64, openai=""),
    ]
    stop_token_ids: Annotated[
        Sequence[int] | None,
        Field(
            "the text ends before the first of them, as before an end-of-text token",
            (),
            max_items=64,
        ),
    ]
    bad_words: Annotated[Sequence[str] | None, Field("never generated", (), max_items=64)]
    logit_bias: Annotated[
        Mapping[str, float] | None,
        Field("a JSON object: token ids, and -100 to 100 that is added to their logits"),
    ]
    response_format: Annotated[
        Mapping[str, Any] | None,
        Field("a JSON object as OpenAI has it: type text, json_object or json_schema; or:"),
    ]
    guided_json: Annotated[Mapping[str, Any] | None, Field("a JSON schema; or:")]
    guided_regex: Annotated[str | None, Field("a regular expression; or:")]
    guided_choice: Annotated[
        Sequence[str] | None, Field("the text is one of them; or:", (), max_items=256)
    ]
    guided_grammar: Annotated[str | None, Field("a grammar, llguidance's Lark or GBNF")]
    ignore_eos: Annotated[bool | None, Field("go on after an end-of-text token", False)]
    drafting: Annotated[
        bool | None,
        Field("false: plain decoding, to compare with, which tensorrt_llm refuses", True),
    ]
    include_drafting: Annotated[
        bool | None,
        Field("true: report who wrote each token, and what rounds proposed", False, openai=""),
    ]
    logprobs: Annotated[
        int | None,
        Field(
            "report log-probabilities, and so many of the best alternatives; unset: none",
            allowed=f"0 to {MAX_LOGPROBS}",
            accepts=lambda x: 0 <= x <= MAX_LOGPROBS,
            openai="",
        ),
    ]
    exclude_input_in_output: Annotated[
        bool | None,
        Field(
            "false: the text starts with the prompt, with logprobs its tokens too (and max_tokens "
            "may be 0)",
            True,
            openai="",
        ),
    ]
    n: Annotated[int | None, Field("choices", 1, f"1 to {MAX_CHOICES}", openai="")]
    cache_salt: Annotated[
        str | None,
        Field("KV cache of earlier texts is reused among requests of the same one alone", ""),
    ]
    priority: Annotated[int | None, Field("lower is served first, among one client's", 0)]
    timeout: float | None  # seconds, more than 0; 600
    parameters: Mapping[str, str] | None  # request parameters of Triton's, beside the tensors


def _table(*sources: Any) -> dict[str, Field]:
    found = {}
    for source in sources:
        for name, hint in get_type_hints(source, include_extras=True).items():
            if get_origin(hint) is not Annotated:
                continue
            kind, field = get_args(hint)
            if get_origin(kind) is UnionType:
                kinds = [each for each in get_args(kind) if each is not type(None)]
                kind = kinds[0] if len(kinds) == 1 else Any
            field = replace(field, name=name, kind=kind)
            item = get_args(kind)[0] if field.is_list else kind
            datatype = field.datatype or DATATYPE_OF.get(item, "BYTES")
            found[name] = replace(field, datatype=datatype)
    return found


FIELDS = _table(Prompt, Options)
DATATYPES = {name: field.datatype for name, field in FIELDS.items()}  # Triton's
