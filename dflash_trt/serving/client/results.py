"""What the server answers, typed, and how it is read from a Triton response."""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Chunk:
    """A piece of one choice; `final` is set in its last one."""

    text: str
    token_ids: list[int]
    round_tokens: list[int]  # tokens that each round committed; the first token is prefill's
    final: Summary | None
    index: int = 0  # of the choice
    token_sources: list[str] = field(default_factory=list)  # "target", "drafter" or "lookup"
    logprobs: list[float] = field(default_factory=list)  # one a token, when asked for
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # by token id
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of this choice so far


@dataclass
class Choice:
    """One whole answer; the fields are those of `Chunk`."""

    index: int
    text: str
    token_ids: list[int]
    token_sources: list[str]
    round_tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    summary: Summary


@dataclass
class Completion:
    """All answers to one request, in the order of their index."""

    choices: list[Choice]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


def to_completion(chunks: Iterable[Chunk]) -> Completion:
    """The chunks of all choices, in the order they came, put together."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    return Completion([_choice(index, parts) for index, parts in sorted(by_index.items())])


def _choice(index: int, chunks: Sequence[Chunk]) -> Choice:
    summary = chunks[-1].final
    assert summary is not None  # `Exchange.end` has seen it
    return Choice(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        token_sources=[source for chunk in chunks for source in chunk.token_sources],
        round_tokens=[count for chunk in chunks for count in chunk.round_tokens],
        logprobs=[value for chunk in chunks for value in chunk.logprobs],
        top_logprobs=[values for chunk in chunks for values in chunk.top_logprobs],
        summary=summary,
    )


def to_chunks(response: service_pb2.ModelInferResponse, start: float) -> list[Chunk]:
    """One chunk a choice of a response; `start`: when the request was sent, `time.monotonic()`."""
    values = _arrays(response)
    reasons = values["finish_reason"].tolist()
    count = len(reasons)
    tokens = _parts(values["token_ids"], values["completion_tokens"])
    rounds = _parts(values["round_tokens"], values["rounds"])
    logprobs = values["token_logprobs"].tolist()
    tops = [
        dict(zip(ids, probs, strict=True))
        for ids, probs in zip(
            values["top_token_ids"].tolist(),
            values["top_logprobs"].tolist(),
            strict=True,
        )
    ]
    sources = [SOURCES[source] for source in values["token_sources"].tolist()]
    chunks = []
    for k in range(count):
        chunks.append(
            Chunk(
                text=values["text_output"][k].decode(),
                token_ids=values["token_ids"][tokens[k]].tolist(),
                round_tokens=values["round_tokens"][rounds[k]].tolist(),
                final=_summary(values, k, start) if reasons[k] else None,
                index=int(values["index"][k]),
                token_sources=sources[tokens[k]],
                logprobs=logprobs[tokens[k]],
                top_logprobs=tops[tokens[k]],
                prompt_tokens=int(values["prompt_tokens"][0]),
                completion_tokens=int(values["completion_tokens"][k]),
            )
        )
    return chunks


def _parts(array: "np.ndarray[Any, Any]", totals: "np.ndarray[Any, Any]") -> list[slice]:
    """Which of the concatenated items belong to which choice.

    A response of one choice holds new items, of which `totals` counts more than these; one of
    several is the whole answer, where each may have the prompt's tokens before its own.
    """
    if len(totals) == 1:
        return [slice(0, len(array))]
    prompt = (len(array) - int(totals.sum())) // len(totals)
    ends = [0, *itertools.accumulate(prompt + total for total in totals.tolist())]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _summary(values: "dict[str, np.ndarray[Any, Any]]", k: int, start: float) -> Summary:
    return Summary(
        finish_reason=values["finish_reason"][k].decode(),
        prompt_tokens=int(values["prompt_tokens"][0]),
        completion_tokens=int(values["completion_tokens"][k]),
        rounds=int(values["rounds"][k]),
        drafted=int(values["drafted"][k]),
        accepted=int(values["accepted"][k]),
        acceptance_length=float(values["acceptance_length"][k]),
        seconds=time.monotonic() - start,
        time_to_first_token=float(values["time_to_first_token"][k]),
    )


def _arrays(response: service_pb2.ModelInferResponse) -> "dict[str, np.ndarray[Any, Any]]":
    arrays = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            array = deserialize_bytes_tensor(content)
        else:
            array = np.frombuffer(content, triton_to_np_dtype(output.datatype))
        arrays[output.name] = array.reshape(tuple(output.shape))
    return arrays
