"""A stand-in for the OpenAI front, for the page: docs/serving.md#drafting-of-each-token.

The page's files are served by the real routes. A request outside the contract is an error of the
test: leaving the block raises it.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from dflash_trt.serving.http.page import OPEN, router

Json = dict[str, Any]
MODEL = "stand-in"
FACTS: Json = {
    "model": MODEL,
    "engine": "onnxruntime",
    "slots": 4,
    "max_model_len": 4096,
    "max_draft_tokens": 7,
    "chat": True,
    "tools": True,
    "schema": True,
    "plain": True,
    "untold": [],
}
ASKED = {"include_usage": True, "include_drafting": True}
NEEDED = {"model", "stream", "stream_options", "temperature", "max_tokens"}
MAY_HAVE = {"messages", "prompt", "seed", "drafting", "response_format", "tools"}
SOURCES = ("drafter", "drafter", "lookup", "grammar", "drafter")
METRICS = """\
# TYPE trtllm_generation_tokens_total counter
trtllm_generation_tokens_total {tokens}
trtllm_num_requests_running 1
trtllm_num_requests_waiting 0
trtllm_prompt_tokens_total 400
dflash_cached_prompt_tokens_total 220
dflash_prefix_cache_bytes 12582912
dflash_acceptance_length_sum {tokens}
dflash_acceptance_length_count {rounds}
trtllm_spec_decode_drafted_tokens_total{{token_position="0"}} 100
trtllm_spec_decode_drafted_tokens_total{{token_position="1"}} 90
trtllm_spec_decode_drafted_tokens_total{{token_position="2"}} 70
trtllm_spec_decode_accepted_tokens_total{{token_position="0"}} 84
trtllm_spec_decode_accepted_tokens_total{{token_position="1"}} 60
trtllm_spec_decode_accepted_tokens_total{{token_position="2"}} 31
"""


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Said:
    """An answer whose last delta has a message that differs from its raw text."""

    raw: str
    delta: Json


class PageServer:
    """A server that gives the next of `answers`, the last one repeatedly.

    An answer is a text, a `Said`, a `Refusal`, or a text that ends with `CUT`, after which the
    connection breaks off. pause: seconds before each round; together: rounds of a chunk; tells:
    whether chunks have sources and proposals. seen: the bodies received.
    """

    CUT = "\N{BLACK SCISSORS}"

    def __init__(
        self,
        *answers: str | Said | Refusal,
        facts: Json | None = None,
        key: str = "",
        pause: float = 0.0,
        together: int = 1,
        tells: bool = True,
    ) -> None:
        self.answers = list(answers)
        self.facts = FACTS | (facts or {})
        self.key, self.pause, self.together, self.tells = key, pause, together, tells
        self.seen: list[Json] = []
        self.usage: list[Json] = []  # of each answer that ended
        self.faults: list[str] = []
        self.stopped = 0  # answers that the client did not read to their end
        self.url = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def admit(request: Request, call_next: Any) -> Response:
            path = request.scope["path"]
            sent = request.headers.get("authorization", "")
            if self.key and path not in OPEN and sent != f"Bearer {self.key}":
                return _error(401, "This server wants a key.")
            response: Response = await call_next(request)
            if response.status_code == 404:
                self.faults.append(f"no such path: {path}")
            return response

        @app.get("/metrics")
        async def metrics() -> Response:
            tokens, rounds = (
                sum(usage[name] for usage in self.usage) for name in ("completion_tokens", "rounds")
            )
            return Response(METRICS.format(tokens=tokens, rounds=rounds))

        app.include_router(router(self.facts))

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return self._answer(await request.json(), "messages")

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return self._answer(await request.json(), "prompt")

        return app

    def _answer(self, body: Json, prompt: str) -> Response:
        self.seen.append(body)
        self.faults += faults(body, prompt)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Refusal):
            return _error(answer.status, str(answer))
        return StreamingResponse(self._events(answer, body), media_type="text/event-stream")

    async def _events(self, answer: str | Said, body: Json) -> AsyncIterator[bytes]:
        raw, end = (answer.raw, answer.delta) if isinstance(answer, Said) else (answer, {})
        text = raw.removesuffix(self.CUT)
        rounds = drafted_rounds(text) if body.get("drafting", True) else plain_rounds(text)
        key = "messages" if "messages" in body else "prompt"
        ended = False
        try:
            for i in range(0, len(rounds), self.together):
                if self.pause:
                    await asyncio.sleep(self.pause)
                some = rounds[i : i + self.together]
                if not self.tells:
                    some = [untold(each) for each in some]
                said = "".join(token["text"] for each in some for token in each["tokens"])
                message = {} if end else {"content": said}
                delta = {"delta": message} if key == "messages" else {"text": said}
                choice = {"index": 0, **delta, "finish_reason": None, "drafting": {"rounds": some}}
                yield _event({"object": "chunk", "choices": [choice], "usage": None})
            if text != raw:
                raise ConnectionError("cut, as the test wants it")
            delta = {"delta": end} if key == "messages" else {"text": ""}
            last = {"index": 0, **delta, "finish_reason": "stop", "drafting": {"rounds": []}}
            yield _event({"object": "chunk", "choices": [last], "usage": None})
            self.usage.append(usage_of(rounds))
            yield _event({"object": "chunk", "choices": [], "usage": self.usage[-1]})
            ended = True
            yield b"data: [DONE]\n\n"
        finally:
            self.stopped += not ended


def faults(body: Json, prompt: str) -> list[str]:
    found = [f"lacks {name}" for name in (NEEDED | {prompt}) - body.keys()]
    found += [f"must not have {name}" for name in body.keys() - NEEDED - MAY_HAVE]
    if body.get("model") != MODEL or body.get("stream") is not True:
        found.append("another model, or no stream")
    if body.get("stream_options") != ASKED:
        found.append(f"stream_options {body.get('stream_options')}")
    for message in body.get("messages", []):
        wanted = {"system": {"content"}, "user": {"content"}, "tool": {"content", "tool_call_id"}}
        role = message.get("role")
        rest = message.keys() - {"role"}
        if role == "assistant":
            if not rest <= {"content", "tool_calls"} or "content" not in rest:
                found.append(f"an assistant's message with {rest}")
        elif rest != wanted.get(role):
            found.append(f"a message of {role} with {rest}")
    return found


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\n+| ?[^\s]{1,6}|\s", text)


def drafted_rounds(text: str) -> list[Json]:
    """Return rounds of 1 to 5 tokens with drafts from every source."""
    tokens = tokens_of(text)
    rounds = [_round(0, [(token, "target") for token in tokens[:1]], [])]
    at = 1
    while at < len(tokens):
        number = len(rounds)
        source = SOURCES[number % len(SOURCES)]
        kept = tokens[at : at + number * 7 % 5]
        own = tokens[at + len(kept) : at + len(kept) + 1]
        at += len(kept) + len(own)
        refused = [" maybe", " so"][: number % 3] if own else []
        likelihoods = [round(0.97 - 0.11 * i, 3) for i in range(len(kept))]
        proposal = [_draft(x, source, True, y) for x, y in zip(kept, likelihoods, strict=True)]
        for i, each in enumerate(refused, len(kept)):
            proposal.append(_draft(each, source, False, 0.08 if i == len(kept) else None))
        committed = [(each, source) for each in kept] + [(each, "target") for each in own]
        rounds.append(_round(number, committed, proposal))
    return rounds


def plain_rounds(text: str) -> list[Json]:
    return [_round(i, [(token, "target")], []) for i, token in enumerate(tokens_of(text))]


def untold(told: Json) -> Json:
    """Return the round as TensorRT-LLM reports it, without drafts."""
    tokens = [{"text": token["text"], "source": None} for token in told["tokens"]]
    return {"round": told["round"], "tokens": tokens, "proposal": []}


def usage_of(rounds: Sequence[Json]) -> Json:
    proposals = [draft for each in rounds for draft in each["proposal"]]
    return {
        "prompt_tokens": 9,
        "completion_tokens": sum(len(each["tokens"]) for each in rounds),
        "rounds": len(rounds) - 1,
        "drafted": len(proposals),
        "accepted": sum(draft["accepted"] for draft in proposals),
    }


def _round(number: int, tokens: Sequence[tuple[str, str]], proposal: list[Json]) -> Json:
    said = [{"text": text, "source": source} for text, source in tokens]
    return {"round": number, "tokens": said, "proposal": proposal}


def _draft(text: str, source: str, accepted: bool, probability: float | None) -> Json:
    return {"text": text, "source": source, "accepted": accepted, "probability": probability}


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error"}}, status)


@contextmanager
def page_server(server: PageServer) -> Iterator[PageServer]:
    """Serve on a free port; AssertionError if a request was outside the contract."""
    config = uvicorn.Config(server.app(), port=0, log_level="critical", lifespan="off")
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not http.started and time.monotonic() < deadline:
        time.sleep(0.02)
    server.url = f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        http.should_exit = http.force_exit = True
        thread.join(10)
    assert not server.faults, server.faults
