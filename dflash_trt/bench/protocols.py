"""How a prompt is streamed from a server, for each protocol: when text came, and how much."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from dflash_trt.bench.prompts import TEMPLATE_OPTIONS
from dflash_trt.errors import BenchError, DflashError, RequestError
from dflash_trt.prompts import Prompt
from dflash_trt.serving.client import AsyncClient

PROTOCOLS = ("triton-grpc", "triton-http", "openai")
TIMEOUT = 600.0  # seconds for one answer
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Ask:
    """One request; end-of-text is ignored where the server can, so that lengths are equal."""

    prompt: Prompt
    max_tokens: int
    temperature: float
    seed: int
    template: Mapping[str, Any] = field(default_factory=lambda: TEMPLATE_OPTIONS)  # of messages
    more: Mapping[str, Any] = field(default_factory=dict)  # options of our own server

    @property
    def options(self) -> dict[str, Any]:
        """Those that every protocol calls by the same name."""
        options = {name: getattr(self, name) for name in ("max_tokens", "temperature", "seed")}
        return {**options, "ignore_eos": True, **self.more}


@dataclass
class Answer:
    """What a server answered; times are `time.perf_counter()`."""

    sent: float
    came: list[float] = field(default_factory=list)  # of each piece of text
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int | None = None  # None: the server does not say
    error: str | None = None
    cached_tokens: int | None = None  # of the prompt, reused; None: the server does not say
    text: str = ""
    round_tokens: list[int] = field(default_factory=list)  # by round, where the server tells


Asking = Callable[[Ask], Awaitable[Answer]]


@asynccontextmanager
async def open_client(
    protocol: str, url: str, model: str | None, connections: int
) -> AsyncIterator[Asking]:
    """Yield a function that asks the server at `url`; model: its name there, for `openai`.

    RequestError for an unknown protocol, BenchError when no model is named and none is listed.
    """
    if protocol not in PROTOCOLS:
        raise RequestError(f"there is no protocol {protocol}", f"Known: {', '.join(PROTOCOLS)}")
    if protocol == "triton-grpc":
        async with AsyncClient(url, retries=0) as client:
            yield partial(_ask_grpc, client)
        return
    base = url if "://" in url else f"http://{url}"
    if protocol == "openai":
        base = base.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=connections)
    async with httpx.AsyncClient(base_url=base, limits=limits, timeout=TIMEOUT) as http:
        if protocol == "triton-http":
            yield partial(_ask_triton, http)
        else:
            yield partial(_ask_openai, http, model or await _first_model(http))


async def _ask_grpc(client: AsyncClient, ask: Ask) -> Answer:
    answer = Answer(time.perf_counter())
    template = None if isinstance(ask.prompt, str) else ask.template
    try:
        async for chunk in client.stream(
            ask.prompt, **ask.options, chat_template_kwargs=template, timeout=TIMEOUT
        ):
            answer.text += chunk.text
            answer.round_tokens += chunk.round_tokens
            if chunk.token_ids:
                answer.came.append(time.perf_counter())
                answer.tokens += len(chunk.token_ids)
            if chunk.final is not None:
                answer.prompt_tokens = chunk.final.prompt_tokens
                answer.cached_tokens = chunk.final.cached_tokens
                answer.rounds = chunk.final.rounds
    except DflashError as error:
        answer.error = str(error)
    return answer


async def _ask_triton(http: httpx.AsyncClient, ask: Ask) -> Answer:
    """Ask by Triton's `generate_stream`."""
    answer = Answer(time.perf_counter(), rounds=0)
    prompt: dict[str, Any] = {"text_input": ask.prompt}
    if not isinstance(ask.prompt, str):
        messages, template = json.dumps(ask.prompt), json.dumps(ask.template)
        prompt = {"messages": messages, "chat_template_kwargs": template}
    body = {**prompt, **ask.options, "stream": True}
    async for event in _events(http, "/v2/models/dflash/generate_stream", body, answer):
        if event["completion_tokens"] > answer.tokens:
            answer.came.append(time.perf_counter())
        answer.tokens, answer.rounds = event["completion_tokens"], event["rounds"]
        answer.text += event["text_output"]
        answer.prompt_tokens = event["prompt_tokens"]
        answer.cached_tokens = event.get("cached_tokens")
    return answer


async def _ask_openai(http: httpx.AsyncClient, model: str, ask: Ask) -> Answer:
    """Ask by `/v1/completions`, for messages by `/v1/chat/completions`: ours, vLLM, SGLang, .."""
    answer = Answer(time.perf_counter())
    path = "/v1/completions"
    prompt: dict[str, Any] = {"prompt": ask.prompt}
    if not isinstance(ask.prompt, str):
        path = CHAT
        prompt = {"messages": ask.prompt, "chat_template_kwargs": ask.template}
    body = {"model": model, **prompt, **ask.options, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async for event in _events(http, path, body, answer):
        for choice in event.get("choices") or []:
            if _has_text(choice):
                answer.came.append(time.perf_counter())
            name = "content" if path == CHAT else "text"
            answer.text += choice.get("delta", choice).get(name) or ""
        if usage := event.get("usage"):
            answer.tokens = usage["completion_tokens"]
            answer.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens")
            answer.rounds = usage.get("rounds")
    if answer.error is None and not answer.tokens:
        answer.error = "the server told no usage at the end of the stream"
    return answer


async def _events(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any], answer: Answer
) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event; a failure is noted in `answer`."""
    try:
        async with http.stream("POST", path, json=dict(body)) as response:
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


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        listed = (await http.get("/v1/models")).json()
        return str(listed["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"the server does not list its models at /v1/models ({error})",
            "Check the URL, or name one with --model",
        ) from error


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a piece says something, or thinks it (`reasoning` in vLLM, elsewhere the last)."""
    names = ("text", "content", "reasoning", "reasoning_content")
    return any(choice.get("delta", choice).get(name) for name in names)
