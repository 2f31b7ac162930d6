"""The gateway's process: an application on each listening socket, and what `serve` tells it."""

import asyncio
import logging
import socket
import sys
from contextlib import AsyncExitStack

import uvicorn
from starlette.types import Receive, Scope, Send

from dflash_trt.errors import DflashError
from dflash_trt.serving import tracing
from dflash_trt.serving.gateway.connections import BACKLOG, Connection
from dflash_trt.serving.gateway.door import State
from dflash_trt.serving.gateway.relay import Relay
from dflash_trt.serving.gateway.settings import LEFT, LISTENING, MOVED, REFUSED, Settings, codec
from dflash_trt.serving.gateway.upstream import Upstream
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
    tracing.tracer()  # what it imports takes long
    async with AsyncExitStack() as stack:
        stack.callback(tracing.close)
        state = State()
        places = Places(await Upstream.open(settings, state), state)
        stack.push_async_callback(places.close)
        loop = asyncio.get_running_loop()
        relay = lambda: Relay(lambda: places.current, state)  # noqa: E731
        stack.callback((await loop.create_server(relay, sock=sockets.pop("grpc"))).close)
        await _serve(places, sockets, said)


class Places:
    """Where requests go, and where those go on that began before it was another place."""

    def __init__(self, current: Upstream, state: State) -> None:
        self.current = current
        self.state = state
        self._left = dict[Upstream, asyncio.Task[None]]()

    async def move(self, settings: Settings) -> None:
        try:
            upstream = await Upstream.open(settings, self.state)
        except DflashError as error:
            return print(REFUSED, error, flush=True)
        self.current, old = upstream, self.current
        print(MOVED, flush=True)
        self._left[old] = asyncio.create_task(self._see_off(old))

    async def _see_off(self, old: Upstream) -> None:
        old.retire()
        await old.empty.wait()
        await old.close()
        del self._left[old]
        print(LEFT, flush=True)

    async def close(self) -> None:
        for old, task in list(self._left.items()):
            task.cancel()
            await old.close()
        await self.current.close()


async def _serve(
    places: Places, sockets: dict[str, socket.socket], said: asyncio.StreamReader
) -> None:
    names, state = {_port(each): name for name, each in sockets.items()}, places.state

    async def by_port(scope: Scope, receive: Receive, send: Send) -> None:
        await places.current.answer(names[scope["server"][1]], scope, receive, send)

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
    serving = asyncio.create_task(server.serve(list(sockets.values())))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    print(LISTENING, flush=True)
    commands = asyncio.create_task(_read_commands(said, places))
    ending = asyncio.create_task(state.drained.wait())
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    state.end()
    server.should_exit = True
    await serving
    commands.cancel()
    ending.cancel()


async def _read_commands(said: asyncio.StreamReader, places: Places) -> None:
    """Does what `serve` says until it closes the pipe or has died."""
    while words := (await said.readline()).split(maxsplit=1):
        if words[0] == b"drain":
            places.state.drain(float(words[1]))
        elif words[0] == b"move":
            await places.move(codec.validate_json(words[1]))
        else:
            places.state.ready = words[0] == b"ready"
    places.state.drain(GRACE)


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])
