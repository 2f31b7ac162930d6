"""Many clients of the public model at once: the roads to it, and the text that must come back.

As a program it is a client to be killed: `load.py GRPC_PORT STREAMS` keeps so many streams open, as
far as there is room, and says "open" once some have text.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

HOST = "127.0.0.1"
WAIT = 60.0  # seconds in which every request has an answer
SOME = 4  # streams of a client to be killed
NO_CONNECTION = "NO_CONNECTION"  # of an HTTP client; over gRPC it is UNAVAILABLE
NO_STATUS = "NO_STATUS"  # of an error in a gRPC stream: the protocol has room for a message only
CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
DTYPES = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
DATATYPES = {"text_input": "BYTES", "messages": "BYTES", "stream": "BOOL", "temperature": "FP32"}


class RefusedError(Exception):
    """A coded error: a gRPC status by name, or an HTTP status as a number."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True)
class Job:
    """One request; `more` are further inputs by name."""

    number: int
    road: str
    prompt: str
    max_tokens: int
    deadline: float | None = None  # seconds, kept by the server
    more: dict[str, Any] = field(default_factory=dict)

    def inputs(self, stream: bool) -> dict[str, Any]:
        asked = {"text_input": self.prompt, "max_tokens": self.max_tokens, **self.more}
        return asked | ({"stream": True} if stream else {})


@dataclass(frozen=True)
class Part:
    """One response: lists have an element for each choice in it."""

    index: list[int]
    text: list[str]
    finish_reason: list[str]
    completion_tokens: list[int]
    token_ids: list[int]


class Client:
    """A client with connections of its own."""

    def __init__(self, grpc_port: int, http_port: int = 0) -> None:
        self.grpc = InferenceServerClient(f"{HOST}:{grpc_port}", channel_args=CHANNEL)
        self.http = aiohttp.ClientSession(
            f"http://{HOST}:{http_port}", timeout=aiohttp.ClientTimeout(WAIT)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.grpc.close()
        await self.http.close()

    def ask(self, job: Job) -> AsyncIterator[Part]:
        """The responses to a job; RefusedError for a coded one. Closing it cancels the request."""
        return ROADS[job.road](self, job)


async def _grpc_stream(client: Client, job: Job, stream: bool) -> AsyncIterator[Part]:
    timeout = None if job.deadline is None else round(job.deadline * 1e6)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "dflash",
            "inputs": tensors(job.inputs(stream)),
            "request_id": str(job.number),
            "timeout": timeout,
        }

    # without the header `triton_grpc_error`: Triton 2.51 crashes when such a stream ends in error
    responses = client.grpc.stream_infer(requests(), stream_timeout=WAIT)
    try:
        async for result, error in responses:
            if error is not None:
                raise RefusedError(NO_STATUS, error.message())
            assert result.get_response().id == str(job.number)
            yield _part(result)
    except grpc.RpcError as error:
        raise RefusedError(error.code().name, error.details()) from None
    finally:
        responses.cancel()


async def _grpc_infer(client: Client, job: Job) -> AsyncIterator[Part]:
    timeout = None if job.deadline is None else round(job.deadline * 1e6)
    call = client.grpc.infer(
        "dflash_infer",
        tensors(job.inputs(stream=False)),
        request_id=str(job.number),
        timeout=timeout,
        client_timeout=WAIT,
    )
    try:
        result = await call
    except InferenceServerException as error:
        code = str(error.status()).removeprefix("StatusCode.")
        raise RefusedError(code, error.message()) from None
    assert result.get_response().id == str(job.number)
    yield _part(result)


async def _http_generate(
    client: Client, job: Job, model: str, road: str, stream: bool
) -> AsyncIterator[Part]:
    body = {**job.inputs(stream), "id": str(job.number)}
    if job.deadline is not None:
        body["timeout"] = round(job.deadline * 1e6)
    try:
        async with client.http.post(f"/v2/models/{model}/{road}", json=body) as response:
            if response.status != 200:
                raise RefusedError(str(response.status), await response.text())
            if not stream:
                yield _json_part(job, json.loads(await response.read()))
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield _json_part(job, json.loads(line[6:]))
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise RefusedError(NO_CONNECTION, str(error)) from None


async def _http_infer(client: Client, job: Job) -> AsyncIterator[Part]:
    inputs = [
        {"name": name, "shape": [1], "datatype": _datatype(name, value), "data": [value]}
        for name, value in job.inputs(stream=False).items()
    ]
    body: dict[str, Any] = {"id": str(job.number), "inputs": inputs}
    if job.deadline is not None:
        body["parameters"] = {"timeout": round(job.deadline * 1e6)}
    try:
        async with client.http.post("/v2/models/dflash_infer/infer", json=body) as response:
            text = await response.text()
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise RefusedError(NO_CONNECTION, str(error)) from None
    if response.status != 200:
        raise RefusedError(str(response.status), text)
    answer = json.loads(text)
    assert answer["id"] == str(job.number)
    yield _json_part(job, {each["name"]: each["data"] for each in answer["outputs"]})


ROADS: dict[str, Callable[[Client, Job], AsyncIterator[Part]]] = {
    "grpc stream": lambda client, job: _grpc_stream(client, job, True),
    "grpc stream, one response": lambda client, job: _grpc_stream(client, job, False),
    "grpc infer": _grpc_infer,
    "http stream": lambda client, job: _http_generate(
        client, job, "dflash", "generate_stream", True
    ),
    "http generate": lambda client, job: _http_generate(client, job, "dflash", "generate", False),
    "http infer": _http_infer,
}
STREAMS = ("grpc stream", "http stream")


def tensors(values: dict[str, Any]) -> list[InferInput]:
    result = []
    for name, value in values.items():
        datatype = _datatype(name, value)
        tensor = InferInput(name, [1], datatype)
        value = value.encode() if isinstance(value, str) else value
        tensor.set_data_from_numpy(np.array([value], DTYPES[datatype]))
        result.append(tensor)
    return result


def _datatype(name: str, value: Any) -> str:
    return DATATYPES.get(name, "INT32")


def _part(result: Any) -> Part:
    texts = {
        name: [each.decode() for each in result.as_numpy(name)]
        for name in ("text_output", "finish_reason")
    }
    numbers = {
        name: result.as_numpy(name).tolist() for name in ("index", "completion_tokens", "token_ids")
    }
    return Part(text=texts["text_output"], finish_reason=texts["finish_reason"], **numbers)


def _json_part(job: Job, answer: dict[str, Any]) -> Part:
    if "error" in answer:  # the status is 200 when a stream has begun
        raise RefusedError("200", answer["error"])
    # a single element is no list in Triton's generate
    lists = {
        name: value if isinstance(value, list) else [value]
        for name, value in answer.items()
        if name in ("index", "text_output", "finish_reason", "completion_tokens", "token_ids")
    }
    return Part(text=lists.pop("text_output"), **lists)


class Expected:
    """What the engine alone makes of each prompt, and how its tokens read."""

    def __init__(
        self, tokens: dict[str, list[int]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.tokens, self._decode = tokens, decode

    def check(self, job: Job, parts: Sequence[Part], *, cut: bool = False) -> None:
        """Nothing lost, nothing twice, all in order; `cut`: a deadline may have ended it."""
        assert len(parts) == 1 or job.road in STREAMS, (job, len(parts))
        expected, got, text = self.tokens[job.prompt][: job.max_tokens], list[int](), ""
        for number, part in enumerate(parts):
            got, text = got + part.token_ids, text + "".join(part.text)
            assert part.completion_tokens == [len(got)], (job, part)
            assert part.index == [0], (job, part)
            assert bool(part.finish_reason[0]) == (number == len(parts) - 1), (job, part)
        reason = parts[-1].finish_reason[0] if parts else ""
        if cut and reason == "cancelled":
            expected = expected[: len(got)]
        else:
            assert reason == "length", (job, parts)
        assert got == expected, (job, got, expected)
        assert text == self._decode(got), (job, text)


async def ask_all(client: Client, job: Job) -> list[Part]:
    return [part async for part in client.ask(job)]


def metric(port: int, name: str) -> dict[str, float]:
    """The samples of a metric by their labels."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=WAIT) as page:
        text = page.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.M)
    return {labels: float(value) for labels, value in found}


async def fill(
    client: Client, jobs: Sequence[Job], probe: Job
) -> tuple[asyncio.Task[dict[str, list[Part]]], str]:
    """Sends jobs, then a probe behind them, on one stream.

    Returns the message that refuses the probe (or "" when it was answered), and what brings the
    other answers by their number.
    """
    answers: dict[str, list[Part]] = {str(job.number): [] for job in (*jobs, probe)}
    probed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for job in (*jobs, probe):
            yield {
                "model_name": "dflash",
                "inputs": tensors(job.inputs(False)),
                "request_id": str(job.number),
            }

    async def collect() -> dict[str, list[Part]]:
        # an error ends its request, not the stream
        async for result, error in client.grpc.stream_infer(requests(), stream_timeout=WAIT):
            if error is not None:
                assert not probed.done(), error
                probed.set_result(error.message())
                continue
            name = result.get_response().id
            answers[name].append(_part(result))
            if name == str(probe.number):
                probed.set_result("")
        return answers

    rest = asyncio.ensure_future(collect())
    await asyncio.wait([rest, probed], timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
    return rest, probed.result()


def resident(pids: Sequence[int]) -> int:
    """Bytes of memory that the processes hold; one that has ended holds none."""
    pages = 0
    for pid in pids:
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


async def _until_killed(port: int, streams: int) -> None:
    begun: set[int] = set()

    async def stream(number: int) -> None:
        while True:
            try:
                async for _ in client.ask(Job(number, "grpc stream", "a", 150)):
                    begun.add(number)
                    if len(begun) == SOME:
                        print("open", flush=True)
            except RefusedError:
                await asyncio.sleep(0.05)
            begun.discard(number)

    async with Client(port) as client:
        await asyncio.gather(*map(stream, range(streams)))


if __name__ == "__main__":
    asyncio.run(_until_killed(int(sys.argv[1]), int(sys.argv[2])))
