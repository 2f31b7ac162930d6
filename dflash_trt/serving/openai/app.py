"""The HTTP application: OpenAI's routes, answered by our client."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from dflash_trt.chat.harmony import Channels
from dflash_trt.errors import DeadlineError, DflashError, RequestError, ServerError
from dflash_trt.serving.client import AsyncClient, Chunk, Summary
from dflash_trt.serving.internal import client_parameters
from dflash_trt.serving.openai import answers, failures
from dflash_trt.serving.openai.answers import CHAT, TEXT, Style
from dflash_trt.serving.openai.failures import Failure
from dflash_trt.serving.openai.fields import ChatFields, TextFields
from dflash_trt.serving.openai.spelling import Spell
from dflash_trt.serving.request_id import HEADER, current
from dflash_trt.serving.server.health import Health

DONE = b"data: [DONE]\n\n"
NOT_READY = "The server is not ready."


@dataclass(frozen=True)
class Served:
    """What the front must know about a build and the server that serves it."""

    models: tuple[str, ...]  # the names a request may give
    max_model_len: int  # tokens of a prompt and its answer
    spell: Spell
    most_drafts: int  # of a round
    client: AsyncClient
    client_key: str  # see `internal.client_parameters`
    triton: Health
    channels: bool = False  # whether the model's text has them (harmony)


def create_app(served: Served) -> FastAPI:
    """The application."""
    app = FastAPI(title="dflash-trt")
    failures.install(app)
    v1 = APIRouter(prefix="/v1")
    created = int(time.time())

    @v1.post("/chat/completions")
    async def chat(fields: ChatFields, request: Request) -> Response:
        return await _answer(served, fields, request, CHAT)

    @v1.post("/completions")
    async def completions(fields: TextFields, request: Request) -> Response:
        return await _answer(served, fields, request, TEXT)

    def entry(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "dflash-trt",
            "max_model_len": served.max_model_len,
        }

    @v1.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [entry(name) for name in served.models]})

    @v1.get("/models/{name}")
    async def model(name: str) -> Response:
        _check_model(served, name)
        return JSONResponse(entry(name))

    app.include_router(v1)

    @app.get("/health")
    async def health() -> Response:
        if not await asyncio.to_thread(served.triton.is_ready):
            raise Failure(503, NOT_READY)
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        page = await asyncio.to_thread(served.triton.metrics)
        if not page:
            raise Failure(503, NOT_READY)
        return Response(page, media_type="text/plain; version=0.0.4")

    return app


async def _answer(
    served: Served, fields: ChatFields | TextFields, request: Request, style: Style
) -> Response:
    _check_model(served, fields.model)
    prompts, options = fields.request()
    host = request.client.host if request.client else ""
    who = client_parameters(host, served.client_key)
    options["parameters"] = {**who, HEADER: current.get()}
    head = {
        "id": style.id_prefix + uuid.uuid4().hex,
        "object": style.chunk_object if fields.stream else style.object,
        "created": int(time.time()),
        "model": fields.model,
    }
    if fields.stream:
        streams = [served.client.stream(prompt, **options) for prompt in prompts]
        chunks = _merged(streams, fields)
        first = await anext(chunks)  # what is wrong before it still gets its own status code
        events = _events(served, head, style, first, chunks, fields)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    tasks = [asyncio.ensure_future(served.client.generate(each, **options)) for each in prompts]
    try:
        completions = await asyncio.gather(*tasks)
    except RequestError as error:
        raise fields.refused(error) from None
    finally:
        for task in tasks:
            task.cancel()
    found = [choice for completion in completions for choice in completion.choices]
    for each in found:
        _check_end(each.summary)
    only = found[0] if len(found) == 1 else None
    choices = [
        {**style.whole(choice, served.spell), "index": index} for index, choice in enumerate(found)
    ]
    for choice in choices if fields.echo else ():
        answers.without_first(choice)
    if served.channels and style is CHAT:
        for choice in choices:
            answers.tell_apart(choice["message"], Channels(), last=True)
    return JSONResponse(
        {
            **head,
            "choices": choices,
            "usage": answers.usage([choice.summary for choice in found], fields.n or 1),
            "metrics": only
            and answers.metrics(only.summary, only.round_tokens, served.most_drafts),
        }
    )


async def _events(
    served: Served,
    head: dict[str, Any],
    style: Style,
    first: Chunk,
    rest: AsyncGenerator[Chunk, None],
    fields: ChatFields | TextFields,
) -> AsyncIterator[bytes]:
    """The server-sent events of a stream; closing it closes `rest`, which cancels the request."""
    offsets: dict[int, int] = {}
    rounds: list[int] = []
    ended: list[Summary] = []
    channels: dict[int, Channels] = {}
    nothing = {"usage": None} if fields.include_usage else {}  # OpenAI has it in every chunk then
    try:
        async for chunk in _chain(first, rest):
            if chunk.final:
                _check_end(chunk.final)
                ended.append(chunk.final)
            choice = style.piece(chunk, served.spell, offsets.get(chunk.index))
            if served.channels and style is CHAT:
                known = channels.setdefault(chunk.index, Channels())
                answers.tell_apart(choice["delta"], known, last=chunk.final is not None)
            if fields.echo and chunk.index not in offsets:
                answers.without_first(choice)
            offsets.setdefault(chunk.index, 0)
            if chunk.logprobs:
                texts = [answers.text(token, served.spell) for token in chunk.token_ids]
                offsets[chunk.index] += sum(map(len, texts))
            rounds += chunk.round_tokens
            so_far = {"usage": answers.so_far(chunk)} if fields.continuous_usage else nothing
            yield to_event({**head, "choices": [choice], **so_far})
        if fields.include_usage:
            only = ended[0] if len(ended) == 1 else None
            totals = {
                "usage": answers.usage(ended, fields.n or 1),
                "metrics": only and answers.metrics(only, rounds, served.most_drafts),
            }
            yield to_event({**head, "choices": [], **totals})
    except (DflashError, Failure) as error:
        yield to_event(failures.to_failure(error).body())
    finally:
        await rest.aclose()
    yield DONE


def _check_model(served: Served, name: str) -> None:
    if name not in served.models:
        names = " and ".join(served.models)
        raise Failure(
            404, f"There is no model {name!r}; there is {names}.", "model", "model_not_found"
        )


async def _merged(
    streams: list[AsyncGenerator[Chunk, None]], fields: ChatFields | TextFields
) -> AsyncGenerator[Chunk, None]:
    """What comes for any of several prompts; choices of the next one follow those of the last."""
    came: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(1)

    async def read(number: int) -> None:
        try:
            async for chunk in streams[number]:
                await came.put(replace(chunk, index=number * (fields.n or 1) + chunk.index))
            await came.put(None)
        except Exception as error:
            await came.put(error)

    tasks = [asyncio.create_task(read(number)) for number in range(len(streams))]
    try:
        left = len(tasks)
        while left:
            chunk = await came.get()
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                left -= 1
            else:
                yield chunk
    except RequestError as error:
        raise fields.refused(error) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _chain(first: Chunk, rest: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield first
    async for chunk in rest:
        yield chunk


def to_event(data: dict[str, Any]) -> bytes:
    """As a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def _check_end(summary: Summary) -> None:
    """OpenAI has no finish_reason for an answer that was broken off: it is an error."""
    if summary.finish_reason == "cancelled":
        raise DeadlineError("the request took longer than its timeout", "Give a longer timeout")
    if summary.finish_reason == "error":
        raise ServerError("a choice ended with an error", "Look at the server's log")
