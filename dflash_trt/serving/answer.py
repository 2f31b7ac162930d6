"""An answer's pieces, and the output tensors that carry them from the public models to clients."""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from dflash_trt.speculation import SOURCES

Array = np.ndarray[Any, Any]


@dataclass
class Chunk:
    """A piece of one choice: new text, tokens and rounds, and the choice's totals so far."""

    text: str
    index: int = 0  # of the choice
    finish_reason: str = ""  # of the last chunk: "stop", "length", "cancelled" or "error"
    stop_word: str = ""  # the one that ended the text
    token_ids: list[int] = field(default_factory=list)
    token_sources: list[str] = field(default_factory=list)  # of `SOURCES`, for each token
    round_tokens: list[int] = field(default_factory=list)  # committed by each round
    logprobs: list[float] = field(default_factory=list)  # of each token, if requested
    top_token_ids: list[list[int]] = field(default_factory=list)  # the best alternatives to each
    top_logprobs: list[list[float]] = field(default_factory=list)
    drafting: list[dict[str, Any]] = field(default_factory=list)  # each round, if requested
    thinking: bool = False  # the text begins with reasoning that the chat template opened
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0  # draft tokens proposed
    accepted: int = 0  # draft tokens accepted
    acceptance_length: float = 0.0  # tau: tokens committed per round
    time_to_first_token: float = 0.0  # seconds, by the server's clock
    seconds: float = 0.0  # since the request was sent, by the client's clock


class Output(NamedTuple):
    """The tensor that carries a field of `Chunk`."""

    name: str
    datatype: str  # Triton's
    help: str
    dims: tuple[int, ...] = (-1,)  # (1,): one value for all choices


# by field, in the order of config.pbtxt, which `scripts/public_tensors.py` writes; the text is
# first because clients of Triton's `infer` read the first output
OUTPUTS = {
    "text": Output("text_output", "BYTES", "new text of each choice"),
    "index": Output(
        "index", "INT32", "which choices this is about: one in a stream, otherwise all n"
    ),
    "finish_reason": Output(
        "finish_reason",
        "BYTES",
        '"" until the last response of a choice: "stop", "length", "cancelled" or "error"',
    ),
    "stop_word": Output("stop_word", "BYTES", 'the one that ended the text; "": none did'),
    "token_ids": Output("token_ids", "INT32", "new tokens, choice after choice"),
    "token_sources": Output(
        "token_sources",
        "INT32",
        "who wrote each: 0 the target, 1 the drafter, 2 a lookup in the text so far, 3 the prompt, "
        "4 a grammar that forced it; none with tensorrt_llm, which does not tell",
    ),
    "round_tokens": Output(
        "round_tokens",
        "INT32",
        "tokens that each new round committed; the first token comes from prefill",
    ),
    "prompt_tokens": Output("prompt_tokens", "INT32", "tokens of the prompt", (1,)),
    "cached_tokens": Output("cached_tokens", "INT32", "of these, reused from an earlier text"),
    "thinking": Output(
        "thinking",
        "INT32",
        "1: the chat template began a thought, with which the text begins; otherwise 0",
        (1,),
    ),
    "completion_tokens": Output("completion_tokens", "INT32", "so far"),
    "rounds": Output("rounds", "INT32", "so far"),
    "drafted": Output("drafted", "INT32", "draft tokens proposed so far"),
    "accepted": Output("accepted", "INT32", "draft tokens accepted so far"),
    "acceptance_length": Output(
        "acceptance_length", "FP32", "tau: tokens committed per round so far"
    ),
    "time_to_first_token": Output("time_to_first_token", "FP32", "seconds; 0 if none came"),
    "logprobs": Output(
        "token_logprobs",
        "FP32",
        "with logprobs, else not there: of each new token, under the target as it is, before any "
        "rule",
    ),
    "top_token_ids": Output(
        "top_token_ids", "INT32", "likewise: the best alternatives to each, ...", (-1, -1)
    ),
    "top_logprobs": Output("top_logprobs", "FP32", "... and their log-probabilities", (-1, -1)),
    "drafting": Output(
        "drafting_rounds",
        "BYTES",
        "with include_drafting, else not there: each new round as JSON (docs/serving.md)",
    ),
}
PER_TOKEN = ("token_ids", "token_sources", "logprobs", "top_token_ids", "top_logprobs")
LISTS = (*PER_TOKEN, "round_tokens", "drafting")  # new in a chunk, as its text is
# left out where nobody asked for them: each tensor takes Triton and its clients time
ON_REQUEST = ("logprobs", "top_token_ids", "top_logprobs", "drafting")


class Codec(NamedTuple):
    """How a value becomes an element of a tensor, and the way back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _to_json(report: Mapping[str, Any]) -> bytes:
    return json.dumps(report, ensure_ascii=False).encode()


TEXT = Codec(str.encode, bytes.decode)
CODECS = {
    "text": TEXT,
    "finish_reason": TEXT,
    "stop_word": TEXT,
    "token_sources": Codec(SOURCES.index, SOURCES.__getitem__),
    "thinking": Codec(int, bool),
    "drafting": Codec(_to_json, json.loads),
}


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Return successive chunks of a choice as one."""
    new: dict[str, Any] = {
        name: list(itertools.chain.from_iterable(getattr(chunk, name) for chunk in chunks))
        for name in LISTS
    }
    new["text"] = "".join(chunk.text for chunk in chunks)
    return replace(chunks[-1], **new)


def join_all(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the choices of a whole answer, by index."""
    choices = defaultdict[int, list[Chunk]](list)
    for chunk in chunks:
        choices[chunk.index].append(chunk)
    return [join(choices[index]) for index in sorted(choices)]


def to_arrays(chunks: Sequence[Chunk]) -> dict[str, Array]:
    """Return a response's tensors by name; chunks: one of a choice, or all choices, whole.

    They are bytes, int32 or float32 of `[choices]` or, choice after choice, `[tokens]` or
    `[rounds]`; `top_...` are `[tokens, K]`.
    """
    arrays = {}
    for name, output in OUTPUTS.items():
        values = [getattr(chunk, name) for chunk in chunks]
        if name in LISTS:
            values = list(itertools.chain.from_iterable(values))
        if output.dims == (1,):
            values = values[:1]
        if name in ON_REQUEST and not values:
            continue
        if name in CODECS:
            values = [CODECS[name].encode(value) for value in values]
        array = np.array(values, triton_to_np_dtype(output.datatype))
        if len(output.dims) == 2:
            array = array.reshape(len(values), -1)
        arrays[output.name] = array
    return arrays


def from_arrays(arrays: Mapping[str, Array], seconds: float) -> list[Chunk]:
    """Return a response's chunks, one per choice; seconds: see `Chunk`."""
    count = len(arrays["index"])
    rounds = arrays["rounds"]
    by_token = _by_choice(arrays["token_ids"], arrays["completion_tokens"])
    by_round = _by_choice(arrays["round_tokens"], rounds)
    slices = {**dict.fromkeys(PER_TOKEN, by_token), "round_tokens": by_round}
    if "drafting_rounds" in arrays:
        # plus the prefill, which yields the first token
        reports = rounds + (arrays["completion_tokens"] > 0)
        slices["drafting"] = _by_choice(arrays["drafting_rounds"], reports)
    columns: dict[str, list[Any]] = {}
    for name, output in OUTPUTS.items():
        if output.name not in arrays:
            continue
        values = arrays[output.name].tolist()
        if name in CODECS:
            values = [CODECS[name].decode(value) for value in values]
        if name in LISTS:
            values = [values[part] for part in slices[name]]
        if output.dims == (1,):
            values *= count
        columns[name] = values
    return [
        Chunk(seconds=seconds, **dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]


def _by_choice(array: Array, totals: Array) -> list[slice]:
    """Return slices; a response of one choice holds only new items, fewer than its total.

    One of several is the whole answer, where each choice may begin with the prompt's tokens.
    """
    if len(totals) == 1:
        return [slice(0, len(array))]
    prompt = (len(array) - int(totals.sum())) // len(totals)
    ends = [0, *itertools.accumulate(prompt + total for total in totals.tolist())]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
