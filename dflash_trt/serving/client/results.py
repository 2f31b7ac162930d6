"""What the server answers, typed, and how it is read from a Triton response."""

import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from dflash_trt.decoding.speculation import SOURCES


@dataclass
class Summary:
    """The totals of a choice, known when it ends."""

    finish_reason: str  # "stop", "length", "cancelled" or "error"
    prompt_tokens: int
    completion_tokens: int
    rounds: int
    drafted: int  # draft tokens proposed
    accepted: int  # draft tokens accepted
    acceptance_length: float  # tau: tokens committed per round
    seconds: float  # from sending the request to this choice's last chunk
    time_to_first_token: float = 0.0  # seconds, by the server's clock
    cached_tokens: int = 0  # of the prompt's, reused from an earlier text


@dataclass
class Chunk:
    """A piece of one choice; `final` is set in its last one."""

    text: str
    token_ids: list[int]
    round_tokens: list[int]  # tokens that each round committed; the first token is prefill's
    final: Summary | None
    index: int = 0  # of the choice
    token_sources: list[str] = field(default_factory=list)  # as in `SOURCES`
    logprobs: list[float] = field(default_factory=list)  # one a token, when asked for
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # by token id
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of this choice so far
    drafting: list[dict[str, Any]] = field(default_factory=list)  # rounds, with include_drafting
    thinking: bool = False  # its text begins with a thought, which the chat template began


@dataclass
class Choice(Chunk):
    """One whole answer."""

    @property
    def summary(self) -> Summary:
        assert self.final is not None  # `Attempts.end` has seen it
        return self.final


@dataclass
class Completion:
    """All answers to one request, in the order of their index."""

    choices: list[Choice]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


LISTS = ("token_ids", "round_tokens", "token_sources", "logprobs", "top_logprobs", "drafting")
# those that are output tensors
TOTALS = [each.name for each in fields(Summary) if each.name not in ("finish_reason", "seconds")]


def to_completion(chunks: Iterable[Chunk]) -> Completion:
    """The chunks of all choices, in the order they came, put together."""
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        choice = choices.setdefault(chunk.index, Choice("", [], [], None, chunk.index))
        choice.text += chunk.text
        for name in LISTS:
            getattr(choice, name).extend(getattr(chunk, name))
        choice.final, choice.prompt_tokens = chunk.final, chunk.prompt_tokens
        choice.completion_tokens = chunk.completion_tokens
        choice.thinking = chunk.thinking
    return Completion([choices[index] for index in sorted(choices)])


def to_chunks(response: service_pb2.ModelInferResponse, start: float) -> list[Chunk]:
    """One chunk a choice of a response; `start`: when the request was sent, `time.monotonic()`."""
    values = {
        output.name: _array(output, content)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    tokens = _by_choice(values["token_ids"], values["completion_tokens"])
    rounds = _by_choice(values["round_tokens"], values["rounds"])
    told = values.get("drafting_rounds", np.array([]))
    # beside the others the prefill, which brings the first token
    drafting = _by_choice(told, values["rounds"] + (values["completion_tokens"] > 0))
    sources = [SOURCES[source] for source in values["token_sources"].tolist()]
    logprobs = values["token_logprobs"].tolist()
    pairs = zip(values["top_token_ids"].tolist(), values["top_logprobs"].tolist(), strict=True)
    tops = [dict(zip(ids, probs, strict=True)) for ids, probs in pairs]
    chunks = []
    for k, reason in enumerate(values["finish_reason"].tolist()):
        summary = Summary(
            finish_reason=reason.decode(),
            seconds=time.monotonic() - start,
            # one for all choices, or one for each
            **{name: values[name][k % len(values[name])].item() for name in TOTALS},
        )
        chunk = Chunk(
            text=values["text_output"][k].decode(),
            token_ids=values["token_ids"][tokens[k]].tolist(),
            round_tokens=values["round_tokens"][rounds[k]].tolist(),
            final=summary if reason else None,
            index=int(values["index"][k]),
            token_sources=sources[tokens[k]],
            logprobs=logprobs[tokens[k]],
            top_logprobs=tops[tokens[k]],
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=summary.completion_tokens,
            drafting=[json.loads(each) for each in told[drafting[k]]],
            thinking=bool(values["thinking"][0]),
        )
        chunks.append(chunk)
    return chunks


def _by_choice(array: "np.ndarray[Any, Any]", totals: "np.ndarray[Any, Any]") -> list[slice]:
    """Which of the concatenated items belong to which choice.

    A response of one choice holds new items, of which `totals` counts more than these; one of
    several is the whole answer, where each may have the prompt's tokens before its own.
    """
    if len(totals) == 1:
        return [slice(0, len(array))]
    prompt = (len(array) - int(totals.sum())) // len(totals)
    ends = [0, *itertools.accumulate(prompt + total for total in totals.tolist())]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _array(output: Any, content: bytes) -> "np.ndarray[Any, Any]":
    array: np.ndarray[Any, Any]
    if output.datatype == "BYTES":
        array = deserialize_bytes_tensor(content)
    else:
        array = np.frombuffer(content, triton_to_np_dtype(output.datatype))
    return array.reshape(tuple(output.shape))
