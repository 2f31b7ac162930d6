"""The OpenAI front as an application of the gateway."""

import secrets
from collections.abc import Callable

from starlette.requests import HTTPConnection
from starlette.responses import Response

from dflash_trt.build import read_manifest, speculation_of
from dflash_trt.build.settings import max_draft_tokens
from dflash_trt.chat import ChatModel, load_chat_template, speller
from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.serving.client import AsyncClient, Tls
from dflash_trt.serving.client.fields import MODEL
from dflash_trt.serving.front import limits
from dflash_trt.serving.gateway.door import Door, State
from dflash_trt.serving.gateway.settings import Settings
from dflash_trt.serving.health import health_of
from dflash_trt.serving.openai import (
    DONE,
    NOT_READY,
    OPEN,
    Failure,
    Served,
    create_app,
    to_event,
)
from dflash_trt.serving.ports import LOOPBACK
from dflash_trt.serving.security import certificate_name
from dflash_trt.tensorrt_llm import KIND, read_llm_args

UNTOLD = [
    "TensorRT-LLM tells how many rounds an answer took and how many draft tokens were accepted, "
    "not what was proposed or who wrote a token; tokens are shared out evenly among the rounds.",
    "TensorRT-LLM drafts for all requests or none: the same answer by plain decoding is not here.",
    "TensorRT-LLM does not tell what its steps cost.",
]


def open_client(settings: Settings) -> AsyncClient:
    """The application's client of Triton."""
    security, key, tls = settings.security, settings.security.inference_key, None
    if security.tls:  # it trusts no other server, and this one at any address
        tls = Tls(security.tls.cert, server_name=certificate_name(security.tls))
    return AsyncClient(
        f"{LOOPBACK}:{settings.triton.grpc}",
        tls=tls,
        headers={"triton-grpc-protocol-inference-key": key} if key else {},
        retries=0,  # a client of OpenAI's has its own
    )


def openai_door(settings: Settings, state: State, client: AsyncClient) -> Door:
    """The application in its middleware. Raises BuildError when the directory is no build."""
    manifest = read_manifest(settings.directory)
    config = manifest["config"]
    by_llm = config["engine"]["kind"] == KIND
    serving = read_llm_args(settings.directory / "engines" / KIND) if by_llm else config["serving"]
    directory = settings.directory / "tokenizer"
    tokenizer = load_tokenizer(directory)
    security = settings.security
    if by_llm:
        drafts = (serving.get("speculative_config") or {}).get("max_draft_len") or 0
    else:
        block = manifest.get("drafter", {}).get("block_size", 1)
        drafts = max_draft_tokens(speculation_of(manifest), block, tensorrt_llm=False)
    dialect = ChatModel(tokenizer, template := load_chat_template(directory)).dialect
    page = {
        "model": manifest["name"],
        "engine": config["engine"]["kind"],
        "slots": int(limits(serving)["slots"]) if by_llm else serving["slots"],
        "max_model_len": serving["max_seq_len"],
        "max_draft_tokens": drafts,
        "chat": template is not None,
        "tools": template is not None and dialect.format is not None,
        "schema": not by_llm or bool(serving.get("guided_decoding_backend")),
        "plain": not (by_llm and drafts),  # whether `drafting: false` is possible
        "untold": UNTOLD if by_llm else [],
    }
    served = Served(
        models=tuple(dict.fromkeys((manifest["name"], MODEL))),
        max_model_len=serving["max_seq_len"],
        spell=speller(tokenizer),
        dialect=dialect,
        max_draft_tokens=drafts,
        client=client,
        client_key=security.client_key,
        triton=health_of(settings.triton, security),
        page=page if settings.page else None,
    )
    free = OPEN if settings.page else frozenset()
    admit = _admission(security.api_key or security.inference_key, state, free)
    return Door(create_app(served), state, admit, _refuse, _event)


def _admission(
    key: str | None, state: State, free: frozenset[str]
) -> Callable[[HTTPConnection], Response | None]:
    """free: paths of files that nobody needs a key for."""

    def admit(request: HTTPConnection) -> Response | None:
        path = request.scope["path"]
        if path == "/metrics" or path in free:
            return None
        if path == "/health":
            return _refuse(503, NOT_READY) if state.refusal else None
        given = request.headers.get("authorization", "").encode()
        if key and not secrets.compare_digest(given, f"Bearer {key}".encode()):
            message = "The API key is missing or wrong."
            return Failure(401, message, code="invalid_api_key").response()
        return _refuse(503, state.refusal) if state.refusal else None

    return admit


def _refuse(status: int, message: str) -> Response:
    return Failure(status, message).response()


def _event(status: int, message: str) -> bytes:
    return to_event(Failure(status, message).body()) + DONE
