"""The gateway's process: an application on each listening socket, and what `serve` tells it."""

import asyncio
import logging
import socket
import sys
from contextlib import AsyncExitStack

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_trt.serving import tracing
from dflash_trt.serving.gateway.connections import BACKLOG, Connection
from dflash_trt.serving.gateway.door import State
from dflash_trt.serving.gateway.proxy import open_session, triton_door
from dflash_trt.serving.gateway.relay import Relay
from dflash_trt.serving.gateway.settings import LISTENING, codec
from dflash_trt.serving.log import configure

KEEP_ALIVE = 60  # seconds without a request
GRACE = 2  # seconds for answers that are about to end, and for the last words of others


async def run() -> None:
    """Serves until its standard input ends or it is drained."""
    configure()
    logging.getLogger("uvicorn.error").setLevel("ERROR")
    said = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(said), sys.stdin
    )
    settings = codec.validate_json(await said.readline())
    sockets = {name: socket.socket(fileno=number) for name, number in settings.listeners.items()}
    state, doors = State(), dict[int, ASGIApp]()  # by port
    tracing.tracer()  # what it imports takes long
    async with AsyncExitStack() as stack:
        stack.callback(tracing.close)
        loop, port = asyncio.get_running_loop(), settings.triton.grpc
        grpc = await loop.create_server(lambda: Relay(port, state), sock=sockets.pop("grpc"))
        stack.callback(grpc.close)
        session = await stack.enter_async_context(open_session())
        security = settings.security
        doors[_port(sockets["http"])] = triton_door(settings.triton.http, security, state, session)
        if "openai" in sockets:
            from dflash_trt.serving.gateway.openai_door import openai_door  # noqa: PLC0415

            door, client = openai_door(settings, state)
            await stack.enter_async_context(client)
            doors[_port(sockets["openai"])] = door
        await _serve(doors, list(sockets.values()), state, said)


async def _serve(
    doors: dict[int, ASGIApp],
    sockets: list[socket.socket],
    state: State,
    said: asyncio.StreamReader,
) -> None:
    async def by_port(scope: Scope, receive: Receive, send: Send) -> None:
        await doors[scope["server"][1]](scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(
            by_port,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a client is its connection's address
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            backlog=BACKLOG,
        )
    )
    serving = asyncio.create_task(server.serve(sockets))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    print(LISTENING, flush=True)
    commands = asyncio.create_task(_read_commands(said, state))
    ending = asyncio.create_task(state.drained.wait())
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    state.end()
    server.should_exit = True
    await serving
    commands.cancel()
    ending.cancel()


async def _read_commands(said: asyncio.StreamReader, state: State) -> None:
    """Does what `serve` says until it closes the pipe or has died."""
    while words := (await said.readline()).decode().split():
        if words[0] == "drain":
            state.drain(float(words[1]))
        else:
            state.ready = words[0] == "ready"
    state.drain(GRACE)


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])
