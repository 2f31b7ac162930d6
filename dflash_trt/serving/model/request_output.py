"""Output tensors of the public models.

`scripts/public_tensors.py` writes them into config.pbtxt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import numpy as np

STRINGS = ("text_output", "finish_reason", "stop_word", "drafting_rounds")
ASKED_FOR = ("token_logprobs", "top_token_ids", "top_logprobs", "drafting_rounds")
NEW = (  # new tokens and rounds; other fields are totals
    "token_ids",
    "token_sources",
    "round_tokens",
    "token_logprobs",
    "top_token_ids",
    "top_logprobs",
    "drafting_rounds",
)


@dataclass
class RequestOutput:
    """New text and tokens of some choices, and their totals so far.

    Lists have one element per choice (one in a stream); those of tokens and rounds concatenate the
    choices.
    """

    # first: clients of Triton's `infer` read the first output
    text_output: Annotated[list[str], "new text of each choice"]
    index: Annotated[list[int], "which choices this is about: one in a stream, otherwise all n"]
    finish_reason: Annotated[
        list[str],
        '"" until the last response of a choice: "stop", "length", "cancelled" or "error"',
    ]
    stop_word: Annotated[list[str], 'the one that ended the text; "": none did']
    token_ids: Annotated[list[int], "new tokens, choice after choice"]
    token_sources: Annotated[
        list[int],
        "who wrote each: 0 the target, 1 the drafter, 2 a lookup in the text so far, 3 the prompt, "
        "4 a grammar that forced it; none with tensorrt_llm, which does not tell",
    ]
    round_tokens: Annotated[
        list[int], "tokens that each new round committed; the first token comes from prefill"
    ]
    prompt_tokens: Annotated[int, "tokens of the prompt"]
    cached_tokens: Annotated[list[int], "of these, reused from an earlier text"]
    thinking: Annotated[
        int, "1: the chat template began a thought, with which the text begins; otherwise 0"
    ]
    completion_tokens: Annotated[list[int], "so far"]
    rounds: Annotated[list[int], "so far"]
    drafted: Annotated[list[int], "draft tokens proposed so far"]
    accepted: Annotated[list[int], "draft tokens accepted so far"]
    acceptance_length: Annotated[list[float], "tau: tokens committed per round so far"]
    time_to_first_token: Annotated[list[float], "seconds; 0 if none came"]
    token_logprobs: Annotated[
        list[float],
        "with logprobs, else not there: of each new token, under the target as it is, before any "
        "rule",
    ] = field(default_factory=list)
    top_token_ids: Annotated[list[list[int]], "likewise: the best alternatives to each, ..."] = (
        field(default_factory=list)
    )
    top_logprobs: Annotated[list[list[float]], "... and their log-probabilities"] = field(
        default_factory=list
    )
    drafting_rounds: Annotated[
        list[str],
        "with include_drafting, else not there: each new round as JSON (docs/serving.md)",
    ] = field(default_factory=list)


DTYPES = {
    name: np.float32 if "float" in str(kind) else np.int32
    for name, kind in get_type_hints(RequestOutput).items()
}


def join_successive(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    values = {name: getattr(first, name) + getattr(second, name) for name in NEW}
    text = [first.text_output[0] + second.text_output[0]]
    return RequestOutput(**{**vars(second), **values, "text_output": text})


def join_choices(outputs: Sequence[RequestOutput]) -> RequestOutput:
    joined: dict[str, Any] = {
        name: [element for output in outputs for element in getattr(output, name)]
        if isinstance(value, list)
        else value
        for name, value in vars(outputs[0]).items()
    }
    return RequestOutput(**joined)


def arrays(output: RequestOutput) -> dict[str, "np.ndarray[Any, Any]"]:
    """Return bytes, int32 or float32 of `[k]` or `[tokens]`; `top_...` are `[tokens, K]`.

    Those that nobody asked for are not there: each tensor takes Triton and its clients time.
    """
    result: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in fields(output):
        value = getattr(output, tensor.name)
        if tensor.name in ASKED_FOR and not value:
            continue
        if tensor.name in STRINGS:
            array = np.array([text.encode() for text in value], dtype=object)
        else:
            array = np.atleast_1d(np.array(value, DTYPES[tensor.name]))
            if tensor.name.startswith("top_"):
                array = array.reshape(len(value), -1)
        result[tensor.name] = array
    return result
