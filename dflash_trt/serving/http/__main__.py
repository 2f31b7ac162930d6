"""Process of the HTTP application (`python -m dflash_trt.serving.http`), started by `serve`.

Standard input: `ApplicationSettings`, then a `ServeState` at each change, a line of JSON each.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from asyncio import constants
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_trt.serving import tracing
from dflash_trt.serving.client import AsyncClient
from dflash_trt.serving.http import LISTENING, ApplicationSettings, ServeState, codec, state_codec
from dflash_trt.serving.http.access import Access
from dflash_trt.serving.http.build import ServedBuild
from dflash_trt.serving.http.connections import (
    ACCEPTED_AT_ONCE,
    HEADER_TIME,
    Connection,
    Connections,
    connection_limit,
)
from dflash_trt.serving.http.guard import Guard
from dflash_trt.serving.http.openai import create_app
from dflash_trt.serving.http.rooted import Rooted
from dflash_trt.serving.http.served import Served, read_served
from dflash_trt.serving.http.state import State
from dflash_trt.serving.http.triton import TritonProxy
from dflash_trt.serving.log import configure
from dflash_trt.serving.ports import reachable_address
from dflash_trt.serving.tracing import HEADER

log = logging.getLogger("dflash_trt.serving.http")

LONGEST_STATE = 2**24  # bytes of a line from `serve`, with all keys
KEEP_ALIVE = 60  # seconds without a request
BACKLOG = 2048  # connections that the system holds until they are accepted
NO_FILES = "socket.accept() out of system resource"  # asyncio's words, each time anew
QUIET = 60.0  # seconds between two lines about it
METHODS = ("GET", "POST", "DELETE")  # of the routes, which pages of other origins may use
NO_GRPC_PROXY = "no_grpc_proxy"  # hosts that gRPC reaches directly
GRACE = 2  # seconds for answers that are about to end


async def serve_until_drained() -> None:
    configure()
    logging.getLogger("uvicorn.error").setLevel("ERROR")
    lines = asyncio.StreamReader(LONGEST_STATE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    settings = codec.validate_json(await lines.readline())
    async with AsyncExitStack() as stack:
        asyncio.get_running_loop().set_exception_handler(_NoFilesHandler())
        serve = ServeState(keys=settings.security.keys)
        state = State(Connections(connection_limit()), serve)
        client = await stack.enter_async_context(_client(settings))
        served = read_served(settings, client)
        server = await _server(settings, served, state, stack)
        listener = socket.socket(fileno=settings.listener)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        listener.listen(BACKLOG)  # uvicorn's is also how many asyncio accepts at once
        print(LISTENING, flush=True)
        reading = asyncio.create_task(_read_states(lines, state, served.build))
        ending = asyncio.create_task(state.drained.wait())
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        state.cancel_running()
        server.should_exit = True
        await serving
        reading.cancel()
        ending.cancel()


def _client(settings: ApplicationSettings) -> AsyncClient:
    security = settings.security
    os.environ[NO_GRPC_PROXY] = reachable_address(security.host)  # a proxy does not lead there
    return AsyncClient(
        f"{security.grpc_host}:{settings.triton.grpc}",
        tls=security.client_tls(),
        headers=security.grpc_headers,
    )


async def _server(
    settings: ApplicationSettings, served: Served, state: State, stack: AsyncExitStack
) -> uvicorn.Server:
    security = settings.security
    proxy = await stack.enter_async_context(TritonProxy(settings.triton, security))
    app = create_app(served, proxy, state)

    async def by_path(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # uvicorn leaves out the body
            scope = {**scope, "method": "GET"}
        is_triton = scope["path"] == "/v2" or scope["path"].startswith("/v2/")
        await (proxy if is_triton else app)(scope, receive, send)

    access = Access(security.own_key, security.hosts, frozenset(security.allow_origin))
    guarded: ASGIApp = Guard(by_path, state, access)
    if origins := security.allow_origin:  # a browser's preflight request has no key
        guarded = CORSMiddleware(guarded, origins, METHODS, ("*",), expose_headers=[HEADER])
    tls = security.http_tls
    vars(constants)["SSL_HANDSHAKE_TIMEOUT"] = HEADER_TIME  # uvicorn has no option for it
    return uvicorn.Server(
        uvicorn.Config(
            Rooted(tracing.instrument(guarded), settings.root_path),
            http=cast(Any, partial(Connection, state.connections)),
            backlog=ACCEPTED_AT_ONCE,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a client is identified by its connection's address
            server_header=False,
            ssl_certfile=tls.cert if tls else None,
            ssl_keyfile=tls.key if tls else None,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
        )
    )


class _NoFilesHandler:
    """Logs that no file descriptor is free once in a while, not for each connection that waits."""

    def __init__(self) -> None:
        self._last = -QUIET

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != NO_FILES:
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._last > QUIET:
            self._last = time.monotonic()
            log.warning("no file descriptor is free: connections wait")


async def _read_states(lines: asyncio.StreamReader, state: State, build: ServedBuild) -> None:
    while line := await lines.readline():
        serve = state_codec.validate_json(line)
        build.drafters = serve.drafters
        state.change(serve)
    state.drain(GRACE)  # the pipe is closed


asyncio.run(serve_until_drained())
