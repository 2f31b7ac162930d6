"""Run the application beside Triton, in a thread of this process."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from dflash_trt.checkpoints.tokenizer import load_tokenizer
from dflash_trt.engines.tensorrt_llm.info import KIND
from dflash_trt.errors import ServerError
from dflash_trt.manifest import read_manifest, speculation_of
from dflash_trt.serving.client import AsyncClient, Tls
from dflash_trt.serving.client.fields import MODEL
from dflash_trt.serving.harmony import has_channels
from dflash_trt.serving.health import health_of
from dflash_trt.serving.launch import HOST, Ports
from dflash_trt.serving.openai.app import Served, create_app
from dflash_trt.serving.openai.spelling import speller
from dflash_trt.serving.security import Security, certificate_name, reach
from dflash_trt.serving.settings import most_drafts

KEY = "DFLASH_TRT_API_KEY"  # or the name with _FILE: a file that holds it
START_TIMEOUT = 10.0  # seconds
GRACE = 2  # seconds that open requests get when the front stops


@contextmanager
def openai_front(
    directory: Path,
    port: int,
    ports: Ports,
    security: Security | None = None,
) -> Iterator[None]:
    """Answers on 127.0.0.1:`port` for as long as the block lasts.

    ports, security: where Triton listens, or will, and what it wants with every request.
    Raises ServerError when the port is taken, the key's file cannot be read or Triton wants a
    certificate, BuildError when `directory` is no build.
    """
    security = security or Security()
    manifest = read_manifest(directory)
    config = manifest["config"]
    connect = _connect(ports, security)
    tokenizer = load_tokenizer(directory / "tokenizer")
    served = Served(
        models=tuple(dict.fromkeys((manifest["name"], MODEL))),
        spell=speller(tokenizer),
        channels=has_channels(tokenizer),
        most_drafts=most_drafts(
            speculation_of(manifest),
            manifest["drafter"]["block_size"],
            config["engine"]["kind"] == KIND,
        ),
        connect=connect,
        triton=health_of(ports, security),
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


def _connect(ports: Ports, security: Security) -> Callable[[], AsyncClient]:
    key, tls = security.inference_key, None
    if security.tls and security.tls.ca:
        raise ServerError(
            "--openai-port does not go with --grpc-ca: the front has no certificate to show",
            "Leave out one of the two",
        )
    if security.tls:  # it trusts no other server, and this one at any address
        tls = Tls(security.tls.cert, server_name=certificate_name(security.tls))
    return lambda: AsyncClient(
        f"{reach(security.host)}:{ports.grpc}",
        tls=tls,
        headers={"triton-grpc-protocol-inference-key": key} if key else {},
        retries=0,  # a client of OpenAI's has its own
    )


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
