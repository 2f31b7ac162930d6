"""The application's routes: OpenAI's API, answered by our client of Triton's gRPC."""

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from dflash_trt.builder import read_manifest, speculation_of
from dflash_trt.chat import (
    HARMONY,
    AnswerParser,
    ChatModel,
    Dialect,
    begun_answer,
    call_numbers,
    load_chat_template,
    parse_tools,
    required_tools,
)
from dflash_trt.checkpoints import Spell, load_tokenizer, sampling_defaults, speller
from dflash_trt.errors import DeadlineError, DflashError, RequestError, ServerError
from dflash_trt.serving import tracing
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.client import MODEL, AnyPrompt, AsyncClient
from dflash_trt.serving.http import ApplicationSettings, answers, failures, page
from dflash_trt.serving.http.answers import ChatReader, ChoiceWriter, to_sse
from dflash_trt.serving.http.bodies import read_body
from dflash_trt.serving.http.build import ServedBuild
from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.fields import ChatFields, Options, TextFields, fields_of
from dflash_trt.serving.http.guard import State, shown_key
from dflash_trt.serving.http.logprobs import ContentLogprobs
from dflash_trt.serving.http.metrics import own_metrics, with_histograms
from dflash_trt.serving.http.responses import (
    Conversation,
    ReadRequest,
    ResponseRequest,
    ResponseStore,
    ResponseWriter,
    names_of,
    read_request,
)
from dflash_trt.serving.http.triton import TritonProxy
from dflash_trt.serving.keys import client_parameters
from dflash_trt.serving.model.llm import limits
from dflash_trt.serving.tracing import HEADER, current
from dflash_trt.tensorrt_llm import KIND, read_llm_args
from dflash_trt.wire import max_draft_tokens

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# a comment, which clients ignore: proxies end a connection on which nothing comes
WAITING = b": waiting\n\n"
AT_ONCE = 1.0  # seconds until a stream that waits has its headers; errors until then have a status
PAUSE = 15.0  # seconds between two comments
NOT_READY = "The server is not ready."
SERVE = "serve"  # the client of requests that look whether rounds go on
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": TextFields,
    "/v1/responses": ResponseRequest,
}
UNTOLD = [
    "TensorRT-LLM tells how many rounds an answer took and how many draft tokens were accepted, "
    "not what was proposed or who wrote a token; tokens are shared out evenly among the rounds.",
    "TensorRT-LLM drafts for all requests or none: the same answer by plain decoding is not here.",
]


@dataclass(frozen=True)
class Served:
    models: tuple[str, ...]  # the names a request may give
    max_model_len: int  # tokens of a prompt and its answer
    spell: Spell
    max_draft_tokens: int  # per round
    client: AsyncClient
    client_key: str  # see `keys.client_parameters`
    chat_model: ChatModel
    responses: ResponseStore
    build: ServedBuild
    root_path: str = ""
    page: dict[str, Any] = field(default_factory=dict)  # facts for the page
    # fields whose default is the model's, not the API's
    sampling: Mapping[str, float] = field(default_factory=dict)


def read_served(settings: ApplicationSettings, client: AsyncClient) -> Served:
    """Read the build. Raises BuildError when the directory is no build."""
    manifest = read_manifest(settings.directory)
    config = manifest["config"]
    by_llm = config["engine"]["kind"] == KIND
    serving = read_llm_args(settings.directory / "engines" / KIND) if by_llm else config["serving"]
    directory = settings.directory / "tokenizer"
    recommended = config["serving"].get("sampling_defaults") == "model"
    tokenizer = load_tokenizer(directory)
    if by_llm:
        drafts = (serving.get("speculative_config") or {}).get("max_draft_len") or 0
    else:
        block = manifest.get("drafter", {}).get("block_size", 1)
        drafts = max_draft_tokens(speculation_of(manifest), block, tensorrt_llm=False)
    template = load_chat_template(directory)
    chat_model = ChatModel(tokenizer, template)
    page = {
        "model": manifest["name"],
        "engine": config["engine"]["kind"],
        "slots": int(limits(serving)["slots"]) if by_llm else serving["slots"],
        "max_model_len": serving["max_seq_len"],
        "max_draft_tokens": drafts,
        "chat": template is not None,
        "tools": template is not None and chat_model.dialect.format is not None,
        "schema": not by_llm or bool(serving.get("guided_decoding_backend")),
        "plain": not (by_llm and drafts),  # whether `drafting: false` is possible
        "untold": UNTOLD if by_llm else [],
    }
    return Served(
        models=tuple(dict.fromkeys((manifest["name"], MODEL))),
        max_model_len=serving["max_seq_len"],
        spell=speller(tokenizer),
        chat_model=chat_model,
        responses=ResponseStore(settings.response_store * 2**20),
        max_draft_tokens=drafts,
        client=client,
        client_key=settings.security.client_key,
        build=ServedBuild(settings.directory, settings.since),
        root_path=settings.root_path,
        page=page,
        sampling=sampling_defaults(directory)[0] if recommended else {},
    )


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
    """Return the answer's chunks; None of a stream that waits, see `_merged`."""
    _check_model(served, fields.model)
    prompts, options = fields.prompts_and_options()
    for name in served.sampling.keys() - fields.model_fields_set - {"max_tokens"}:
        options.pop(name, None)  # the model fills in what the build recommends
    host = request.client.host if request.client else ""
    who = client_parameters(SERVE if request.state.is_own else host, served.client_key)
    options["parameters"] = {**who, HEADER: current.get(), **tracing.trace_headers()}
    return _merged(served.client, prompts, options, fields)


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


async def _merged(
    client: AsyncClient,
    prompts: Sequence[AnyPrompt],
    options: Options,
    fields: ChatFields | TextFields,
) -> AsyncGenerator[Chunk | None, None]:
    """Yield chunks or choices of all prompts as they come, choices numbered across prompts.

    Of a stream that waits also None: after `AT_ONCE` at first, then every `PAUSE` seconds.
    """
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(1)

    async def read(number: int, prompt: AnyPrompt) -> None:
        try:
            if fields.stream:
                async for chunk in client.stream(prompt, **options):
                    await put(number, chunk)
            else:
                for choice in (await client.generate(prompt, **options)).choices:
                    await put(number, choice)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def put(number: int, chunk: Chunk) -> None:
        await queue.put(replace(chunk, index=number * fields.n + chunk.index))

    tasks = [asyncio.create_task(read(number, prompt)) for number, prompt in enumerate(prompts)]
    ended: list[Chunk] = []
    try:
        left = len(tasks)
        pause = AT_ONCE if fields.stream else None
        while left:
            try:
                async with asyncio.timeout(pause):
                    chunk = await queue.get()
            except TimeoutError:
                pause = PAUSE
                yield None
                continue
            pause = PAUSE if fields.stream else None
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                left -= 1
            else:
                if chunk.finish_reason:
                    ended.append(chunk)
                yield chunk
        _describe_span(fields, ended)
    except RequestError as error:
        raise fields.translate_refusal(error) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _describe_span(fields: ChatFields | TextFields, ended: Sequence[Chunk]) -> None:
    """Add what OpenTelemetry's conventions for generative AI name, and the acceptance."""
    usage = answers.usage(ended, fields.n)
    rounds = sum(chunk.rounds for chunk in ended)
    accepted = sum(chunk.accepted for chunk in ended)
    tracing.describe(
        gen_ai__operation__name="chat" if isinstance(fields, ChatFields) else "text_completion",
        gen_ai__provider__name="dflash-trt",
        gen_ai__request__model=fields.model,
        gen_ai__usage__input_tokens=usage["prompt_tokens"],
        gen_ai__usage__output_tokens=usage["completion_tokens"],
        gen_ai__response__finish_reasons=[chunk.finish_reason for chunk in ended],
        dflash__acceptance_length=1 + accepted / max(1, rounds),
        dflash__request_id=current.get(),
    )


def _refuse_aborted(last: Chunk) -> None:
    """Raise an error for an aborted answer: OpenAI has no finish_reason for it."""
    if last.finish_reason == "cancelled":
        raise DeadlineError("the request took longer than its timeout", "Give a longer timeout")
    if last.finish_reason == "error":
        raise ServerError("a choice ended with an error", "Look at the server's log")
