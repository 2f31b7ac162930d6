"""How a prompt is streamed from a server, for each protocol: when text came, and how much."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import httpx

from dflash_trt.bench.prompts import TEMPLATE_OPTIONS
from dflash_trt.errors import BenchError, DflashError, RequestError
from dflash_trt.prompts import Prompt
from dflash_trt.serving.client import AsyncClient

PROTOCOLS = ("triton-grpc", "triton-http", "openai")
TIMEOUT = 600.0  # seconds for one answer


@dataclass(frozen=True)
class Ask:
    """One request; end-of-text is ignored where the server can, so that lengths are equal."""

    prompt: Prompt
    max_tokens: int
    temperature: float
    seed: int


@dataclass
class Answer:
    """What came back; times are `time.perf_counter()`."""

    sent: float
    came: list[float] = field(default_factory=list)  # of each piece of text
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int | None = None  # None: the server does not say
    error: str | None = None


class Client(Protocol):
    """One connection, or a pool of them, to a server."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
    async def ask(self, ask: Ask) -> Answer: ...


def open_client(protocol: str, url: str, model: str | None, connections: int) -> Client:
    """A client for a server at `url`; model: the name it knows, for OpenAI's protocol.

    RequestError for an unknown protocol.
    """
    if protocol == "triton-grpc":
        return TritonGrpc(url)
    if protocol == "triton-http":
        return TritonHttp(url, connections)
    if protocol == "openai":
        return OpenAi(url, model, connections)
    raise RequestError(f"there is no protocol {protocol}", f"Known: {', '.join(PROTOCOLS)}")


class TritonGrpc:
    """Our own client, without its retries."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Self:
        self._client = AsyncClient(self._url, retries=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, ask: Ask) -> Answer:
        answer = Answer(time.perf_counter())
        try:
            async for chunk in self._client.stream(
                ask.prompt,
                max_tokens=ask.max_tokens,
                temperature=ask.temperature,
                seed=ask.seed,
                ignore_eos=True,
                chat_template_kwargs=None if isinstance(ask.prompt, str) else TEMPLATE_OPTIONS,
                timeout=TIMEOUT,
            ):
                if chunk.token_ids:
                    answer.came.append(time.perf_counter())
                    answer.tokens += len(chunk.token_ids)
                if chunk.final is not None:
                    answer.prompt_tokens, answer.rounds = (
                        chunk.final.prompt_tokens,
                        chunk.final.rounds,
                    )
        except DflashError as error:
            answer.error = str(error)
        return answer


class _Http:
    """JSON out, server-sent events back, over one pool of connections."""

    def __init__(self, url: str, connections: int) -> None:
        limits = httpx.Limits(max_connections=connections)
        base = url if "://" in url else f"http://{url}"
        self._client = httpx.AsyncClient(base_url=base, limits=limits, timeout=TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def events(
        self, path: str, body: Mapping[str, Any], answer: Answer
    ) -> AsyncIterator[dict[str, Any]]:
        """Each event's JSON; a failure is noted in `answer`."""
        try:
            async with self._client.stream("POST", path, json=dict(body)) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"HTTP {response.status_code}: {text[:300]}"
                    return
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        answer.error = str(event["error"])[:300]
                        return
                    yield event
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"


class TritonHttp(_Http):
    """Triton's `generate_stream`."""

    async def ask(self, ask: Ask) -> Answer:
        answer = Answer(time.perf_counter())
        prompt: dict[str, Any] = {"text_input": ask.prompt}
        if not isinstance(ask.prompt, str):
            prompt = {"messages": ask.prompt, "chat_template_kwargs": TEMPLATE_OPTIONS}
            prompt = {name: json.dumps(value) for name, value in prompt.items()}
        body = {
            **prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": True,
            "stream": True,
        }
        rounds = 0
        async for event in self.events("/v2/models/dflash/generate_stream", body, answer):
            if event["completion_tokens"] > answer.tokens:
                answer.came.append(time.perf_counter())
            answer.tokens, rounds = event["completion_tokens"], event["rounds"]
            answer.prompt_tokens = event["prompt_tokens"]
        answer.rounds = rounds
        return answer


class OpenAi(_Http):
    """`/v1/completions`, of messages `/v1/chat/completions`: ours, vLLM, SGLang, llama.cpp, .."""

    def __init__(self, url: str, model: str | None, connections: int) -> None:
        super().__init__(url.rstrip("/").removesuffix("/v1"), connections)
        self._model = model

    async def __aenter__(self) -> Self:
        if self._model is None:
            try:
                listed = (await self._client.get("/v1/models")).json()
                self._model = listed["data"][0]["id"]
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                await self._client.aclose()
                raise BenchError(
                    f"the server does not list its models at /v1/models ({error})",
                    "Check the URL, or name one with --model",
                ) from error
        return self

    async def ask(self, ask: Ask) -> Answer:
        answer = Answer(time.perf_counter())
        path = "/v1/completions"
        prompt: dict[str, Any] = {"prompt": ask.prompt}
        if not isinstance(ask.prompt, str):
            path = "/v1/chat/completions"
            prompt = {"messages": ask.prompt, "chat_template_kwargs": TEMPLATE_OPTIONS}
        body = {
            "model": self._model,
            **prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async for event in self.events(path, body, answer):
            if any(map(_has_text, event.get("choices") or [])):
                answer.came.append(time.perf_counter())
            usage = event.get("usage")
            if usage:
                answer.tokens = usage["completion_tokens"]
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.rounds = usage.get("rounds")
        if answer.error is None and not answer.tokens:
            answer.error = "the server told no usage at the end of the stream"
        return answer


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a piece says something, or thinks it (`reasoning` in vLLM, elsewhere the last)."""
    names = ("text", "content", "reasoning", "reasoning_content")
    return any(choice.get("delta", choice).get(name) for name in names)
