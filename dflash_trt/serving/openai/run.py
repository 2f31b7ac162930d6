"""Run the application beside Triton, in a thread of this process."""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from dflash_trt.checkpoints.tokenizer import load_tokenizer
from dflash_trt.errors import ServerError
from dflash_trt.manifest import read_manifest
from dflash_trt.serving.client import AsyncClient
from dflash_trt.serving.client.fields import MODEL
from dflash_trt.serving.health import Health
from dflash_trt.serving.launch import HOST, Ports
from dflash_trt.serving.openai.app import Served, create_app
from dflash_trt.serving.openai.spelling import speller

KEY = "DFLASH_TRT_API_KEY"  # or the name with _FILE: a file that holds it
START_TIMEOUT = 10.0  # seconds
GRACE = 2  # seconds that open requests get when the front stops


@contextmanager
def openai_front(
    directory: Path,
    port: int,
    ports: Ports,
    host: str = HOST,
    headers: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Answers on 127.0.0.1:`port` for as long as the block lasts.

    ports, host: where Triton listens, or will; headers: what its gRPC wants with every request.
    Raises ServerError when the port is taken or the key's file cannot be read, BuildError when
    `directory` is no build.
    """
    manifest = read_manifest(directory)
    served = Served(
        models=tuple(dict.fromkeys((manifest["name"], MODEL))),
        spell=speller(load_tokenizer(directory / "tokenizer")),
        most_drafts=manifest["drafter"]["block_size"] - 1,
        # no retries: a client of OpenAI's has its own
        connect=lambda: AsyncClient(f"{host}:{ports.grpc}", headers=headers, retries=0),
        triton=Health(
            f"http://{host}:{ports.http}", f"http://{host}:{ports.metrics}/metrics", headers={}
        ),
        key=_key(),
    )
    listener = _listen(port)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(served),
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=GRACE,
        )
    )
    # uvicorn leaves signals alone outside the main thread
    thread = threading.Thread(target=server.run, args=([listener],), name="openai", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not server.started and time.monotonic() < deadline and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise ServerError("the OpenAI front did not start", "Please report it")
        yield
    finally:
        server.should_exit = True
        thread.join(GRACE + 3)
        listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise ServerError(
            f"port {port} (openai) is in use or may not be used",
            "Stop what listens on it, or give another: --openai-port PORT",
        ) from error
    return listener


def _key() -> str | None:
    """The key that clients must send, from the environment; None: no key is asked for."""
    if file := os.environ.get(f"{KEY}_FILE"):
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ServerError(
                f"cannot read {file}: {error}", f"Correct the variable {KEY}_FILE"
            ) from error
        if not key:
            raise ServerError(f"{file} is empty", "Write the key into it")
        return key
    return os.environ.get(KEY) or None
