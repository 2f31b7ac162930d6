"""The application's routes: OpenAI's API, answered by our client of Triton's gRPC."""

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from dflash_trt.chat import (
    HARMONY,
    AnswerParser,
    Dialect,
    begun_answer,
    call_numbers,
    parse_tools,
    required_tools,
)
from dflash_trt.errors import DeadlineError, DflashError, RequestError, ServerError
from dflash_trt.serving import tracing
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.http import answers, failures, page
from dflash_trt.serving.http.access import shown_key
from dflash_trt.serving.http.answers import ChatReader, ChoiceWriter, to_sse
from dflash_trt.serving.http.bodies import read_body
from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.fields import ChatFields, TextFields, fields_of
from dflash_trt.serving.http.logprobs import ContentLogprobs
from dflash_trt.serving.http.merging import merged
from dflash_trt.serving.http.metrics import own_metrics, with_histograms
from dflash_trt.serving.http.responses import (
    Conversation,
    ReadRequest,
    ResponseRequest,
    ResponseWriter,
    names_of,
    read_request,
)
from dflash_trt.serving.http.served import Served
from dflash_trt.serving.http.state import State
from dflash_trt.serving.http.triton import TritonProxy
from dflash_trt.serving.keys import client_parameters
from dflash_trt.serving.tracing import HEADER, current

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# a comment, which clients ignore: proxies end a connection on which nothing comes
WAITING = b": waiting\n\n"
NOT_READY = "The server is not ready."
SERVE = "serve"  # the client of requests that look whether rounds go on
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": TextFields,
    "/v1/responses": ResponseRequest,
}


def create_app(served: Served, triton: TritonProxy, state: State) -> FastAPI:
    servers = [{"url": served.root_path}] if served.root_path else None
    # the pages of docs_url and redoc_url load from elsewhere
    app = FastAPI(title="dflash-trt", docs_url=None, redoc_url=None, servers=servers)
    failures.install_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        if not await triton.is_ready():
            raise Failure(503, NOT_READY)
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        page = served.build.metric() + own_metrics(state.serve, state.answers)
        of_triton = await triton.metrics()
        if of_triton is not None:  # it may be starting again
            page = with_histograms(of_triton) + page
        return Response(page, media_type="text/plain; version=0.0.4")

    app.include_router(_answer_routes(served))
    app.include_router(_fact_routes(served))
    app.include_router(page.router(served.page, served.root_path))
    _describe_bodies(app)
    return app


def _answer_routes(served: Served) -> APIRouter:
    v1 = APIRouter(prefix="/v1")

    @v1.post("/chat/completions")
    async def chat(request: Request) -> Response:
        fields = await read_body(request, partial(fields_of, ChatFields))
        return await _answer(served, fields, request)

    @v1.post("/completions")
    async def completions(request: Request) -> Response:
        fields = await read_body(request, partial(fields_of, TextFields))
        return await _answer(served, fields, request)

    @v1.post("/responses")
    async def responses(request: Request) -> Response:
        owner = shown_key(request)
        read = partial(read_request, store=served.responses, owner=owner)
        return await _respond(served, await read_body(request, read), request, owner)

    @v1.get("/responses/{name}")
    async def response(name: str, request: Request) -> Response:
        conversation = served.responses.conversation(shown_key(request), name)
        if conversation is None:
            raise _no_response(name)
        return JSONResponse(conversation.response)

    @v1.delete("/responses/{name}")
    async def delete_response(name: str, request: Request) -> Response:
        if not served.responses.delete(shown_key(request), name):
            raise _no_response(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @v1.post("/responses/{name}/cancel")
    async def cancel_response(name: str) -> Response:
        message = "Only a background response can be cancelled, and there are none here."
        raise Failure(400, message)

    return v1


def _fact_routes(served: Served) -> APIRouter:
    v1 = APIRouter(prefix="/v1")
    created = int(time.time())

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
        # `dflash` is accepted too; one name for clients that pick a model from the list
        return JSONResponse({"object": "list", "data": [entry(served.models[0])]})

    @v1.get("/models/{name}")
    async def model(name: str) -> Response:
        _check_model(served, name)
        return JSONResponse(entry(name))

    @v1.get("/build")
    async def build() -> Response:
        return JSONResponse(served.build.facts())

    return v1


def _describe_bodies(app: FastAPI) -> None:
    """Add the bodies, which FastAPI does not read here, to the API's description."""
    description = app.openapi()
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for path, fields in BODIES.items():
        schema = fields.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[fields.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{fields.__name__}"}
        description["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }


async def _answer(served: Served, fields: ChatFields | TextFields, request: Request) -> Response:
    chunks = _ask(served, fields, request)
    new_writer = _writers(served, fields)
    prefix = "cmpl-"
    kind = "text_completion"
    if isinstance(fields, ChatFields):
        prefix = "chatcmpl-"
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
    head = {
        "id": prefix + uuid.uuid4().hex,
        "object": kind,
        "created": int(time.time()),
        "model": fields.model,
        "system_fingerprint": served.build.fingerprint,
    }
    if fields.stream:
        first = await anext(chunks)  # errors that come at once get their own status code
        return _streamed(_events(served, head, new_writer, first, chunks, fields))
    choices = sorted([chunk async for chunk in chunks if chunk], key=lambda chunk: chunk.index)
    for choice in choices:
        _refuse_aborted(choice)
    written = [piece for choice in choices for piece in new_writer().write(choice)]
    totals = _totals(served, fields, choices, choices[0].round_tokens)
    return JSONResponse({**head, "choices": written, **totals})


async def _respond(served: Served, read: ReadRequest, request: Request, owner: str) -> Response:
    if read.tools.left_out:
        log.info("hosted tools are left out of a request: %s", names_of(read.tools.left_out))
    chunks = _ask(served, read.chat, request)
    stores = read.request.store and served.responses.limit > 0
    hidden = served.chat_model.hidden_in_chats(with_tools=bool(read.chat.tools))
    answer = ResponseWriter(
        read,
        served.sampling,
        _readers(served.chat_model.dialect, read.chat)(),
        ContentLogprobs(served.spell, hidden),
        stored=stores,
    )

    def keep(response: dict[str, Any]) -> bool:
        conversation = Conversation(response, [*read.items, *response["output"]])
        return stores and served.responses.keep(owner, conversation)

    async def events(first: Chunk | None) -> AsyncIterator[bytes]:
        try:
            yield b"".join(answer.begin())
            async for chunk in _with_first(first, chunks):
                if chunk is None:
                    yield WAITING
                    continue
                yield b"".join(answer.push(chunk))
                if chunk.finish_reason:
                    _refuse_aborted(chunk)
                    yield b"".join(answer.end(chunk, keep))
        except (DflashError, Failure) as error:
            if not read.request.stream:
                raise
            yield b"".join(answer.fail(failures.to_failure(error)))
        finally:
            await chunks.aclose()

    first = await anext(chunks)
    if read.request.stream:
        return _streamed(events(first))
    async for _ in events(first):
        pass
    return JSONResponse(answer.response)


def _no_response(name: str) -> Failure:
    message = f"Response with id {name[:80]!r} is not found: answers are kept for an hour at most."
    return Failure(404, message, code="not_found")


def _streamed(events: AsyncIterator[bytes]) -> Response:
    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _with_first(
    first: Chunk | None, rest: AsyncIterator[Chunk | None]
) -> AsyncIterator[Chunk | None]:
    yield first
    async for chunk in rest:
        yield chunk


def _ask(
    served: Served, fields: ChatFields | TextFields, request: Request
) -> AsyncGenerator[Chunk | None, None]:
    """Return the answer's chunks; None of a stream that waits, see `merged`."""
    _check_model(served, fields.model)
    prompts, options = fields.prompts_and_options()
    for name in served.sampling.keys() - fields.model_fields_set - {"max_tokens"}:
        options.pop(name, None)  # the model fills in what the build recommends
    host = request.client.host if request.client else ""
    who = client_parameters(SERVE if request.state.is_own else host, served.client_key)
    options["parameters"] = {**who, HEADER: current.get(), **tracing.trace_headers()}
    return merged(served.client, prompts, options, fields)


def _writers(served: Served, fields: ChatFields | TextFields) -> Callable[[], ChoiceWriter]:
    """Return a factory of choice writers."""
    new_reader = None
    if isinstance(fields, ChatFields):
        new_reader = _readers(served.chat_model.dialect, fields)
    drafting = fields.stream and fields.stream_options.include_drafting

    def new_writer() -> ChoiceWriter:
        return ChoiceWriter(
            served.spell,
            fields.echo,
            fields.stream,
            new_reader and new_reader(),
            drafting=drafting,
            stop_ids=fields.stop_token_ids,
            hidden=served.chat_model.hidden,
        )

    return new_writer


def _readers(dialect: Dialect, fields: ChatFields) -> Callable[[], ChatReader]:
    """Return a factory of readers of a chat's answers."""
    try:
        tools = parse_tools(fields.tools)
        only_calls = bool(required_tools(tools, fields.tool_choice))
        begun = ""
        numbers: list[int] = []
        if fields.continue_final_message or dialect.named_ids:
            messages = [message.model_dump(exclude_unset=True) for message in fields.messages]
            numbers = call_numbers(dialect, messages)
        if fields.continue_final_message:
            begun = begun_answer(dialect, messages)
    except RequestError as error:
        raise fields.translate_refusal(error) from None
    tools = [] if fields.tool_choice == "none" else tools
    if tools and dialect.format is None:
        raise Failure(400, "'tools': this model writes calls in a form not known here.", "tools")
    format = dialect.format if tools or dialect.format is HARMONY else None

    def new_parser(thinking: bool) -> AnswerParser:
        thinking = thinking and not begun  # which opens the thought itself
        tags = dialect.reasoning_tags
        return AnswerParser(format, tools, tags, thinking=thinking, begun=begun, numbers=numbers)

    one_call = not fields.parallel_tool_calls
    return partial(ChatReader, new_parser, one_call=one_call, only_calls=only_calls)


async def _events(
    served: Served,
    head: dict[str, Any],
    new_writer: Callable[[], ChoiceWriter],
    first: Chunk | None,
    rest: AsyncGenerator[Chunk | None, None],
    fields: ChatFields | TextFields,
) -> AsyncIterator[bytes]:
    """Yield a stream's events; closing it closes `rest`, which cancels the request."""
    writers = defaultdict[int, ChoiceWriter](new_writer)
    rounds: list[int] = []
    ended: list[Chunk] = []
    options = fields.stream_options
    # OpenAI then sends it in every chunk
    usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
    try:
        async for chunk in _with_first(first, rest):
            if chunk is None:
                yield WAITING
                continue
            rounds += chunk.round_tokens
            if chunk.finish_reason:
                _refuse_aborted(chunk)
                ended.append(chunk)
            if options.include_usage and options.continuous_usage_stats:
                counts = answers.token_counts(chunk.prompt_tokens, chunk.completion_tokens)
                usage = {"usage": counts}
            for choice in writers[chunk.index].write(chunk):
                yield to_sse({**head, "choices": [choice], **usage})
        if options.include_usage:
            yield to_sse({**head, "choices": [], **_totals(served, fields, ended, rounds)})
    except (DflashError, Failure) as error:
        yield to_sse(failures.to_failure(error).body())
    finally:
        await rest.aclose()
    yield DONE


def _totals(
    served: Served,
    fields: ChatFields | TextFields,
    ended: Sequence[Chunk],
    round_tokens: Sequence[int],
) -> dict[str, Any]:
    metrics = None
    if len(ended) == 1:
        metrics = answers.metrics(ended[0], round_tokens, served.max_draft_tokens)
    return {"usage": answers.usage(ended, fields.n), "metrics": metrics}


def _check_model(served: Served, name: str) -> None:
    if name not in served.models:
        message = f"There is no model {name!r}; there is {' and '.join(served.models)}."
        raise Failure(404, message, "model", "model_not_found")


def _refuse_aborted(last: Chunk) -> None:
    """Raise an error for an aborted answer: OpenAI has no finish_reason for it."""
    if last.finish_reason == "cancelled":
        raise DeadlineError("the request took longer than its timeout", "Give a longer timeout")
    if last.finish_reason == "error":
        raise ServerError("a choice ended with an error", "Look at the server's log")
