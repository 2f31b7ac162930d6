"""Serve a built directory until told to stop, or for as long as a block of Python lasts."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from dflash_trt.errors import ServerError
from dflash_trt.serving.client import stream
from dflash_trt.serving.launch import HOST, Ports
from dflash_trt.serving.process import Server


def serve(
    directory: Path,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    openai_port: int | None = None,
) -> int:
    """Serves a built directory until SIGINT or SIGTERM; returns the exit code 0.

    openai_port: where the OpenAI front answers; None: nowhere.
    Raises `ServerError` when a port is taken, a model does not load or the server dies.
    """
    console = Console()
    asked_to_stop = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: asked_to_stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    ports = Ports(http_port, grpc_port, metrics_port)
    front = ExitStack()
    try:
        if openai_port is not None:  # before Triton, to say at once what is wrong with it
            front.enter_context(_openai_front(directory, openai_port, ports))
        # the front ends first: its open streams would hold up the server
        with front, Server(directory, ports) as server, front:
            console.print(f"starting Triton (log: {server.log}) ...", highlight=False)
            if server.wait_ready(asked_to_stop):
                _warm_up(server.ports)
                console.print(
                    _how_to_call(server.ports, openai_port), highlight=False, markup=False
                )
            while not asked_to_stop.wait(0.2):
                server.check_alive()
            console.print("stopping ...")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


@contextmanager
def running_server(directory: Path) -> Iterator[Ports]:
    """A ready server on free ports of 127.0.0.1, for as long as the block lasts."""
    with Server(directory, free_ports()) as server:
        server.wait_ready()
        _warm_up(server.ports)
        yield server.ports


def free_ports() -> Ports:
    """Three ports of 127.0.0.1 that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind((HOST, 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def _warm_up(ports: Ports) -> None:
    """One short request, so that no user's first one pays for measuring the draft length."""
    for _ in stream(f"{HOST}:{ports.grpc}", "a", max_tokens=2, temperature=0.0):
        pass


def _openai_front(directory: Path, port: int, ports: Ports) -> AbstractContextManager[None]:
    try:
        from dflash_trt.serving.openai.run import openai_front  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ServerError(
            f"--openai-port needs the Python package {error.name}",
            "Run: pip install 'dflash-trt[openai]'",
        ) from error
    return openai_front(directory, port, ports)


def _how_to_call(ports: Ports, openai_port: int | None) -> str:
    http = f"http://{HOST}:{ports.http}"
    front = f"\n  OpenAI   http://{HOST}:{openai_port}/v1" if openai_port is not None else ""
    return f"""\
ready
  HTTP     {http}
  gRPC     {HOST}:{ports.grpc}
  metrics  http://{HOST}:{ports.metrics}/metrics{front}
try
  dflash-trt generate --url {HOST}:{ports.grpc} 'def main():'
  curl -N {http}/v2/models/dflash/generate_stream \\
    -d '{{"text_input": "def main():", "max_tokens": 64, "stream": true}}'
Ctrl-C stops it"""
