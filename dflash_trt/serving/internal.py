"""What the processes of one server share and no client has: keys, and a directory for a socket."""

import ctypes
import hmac
import os
import secrets
import select
import signal
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.decoding import Int64
from dflash_trt.errors import ServerError

KEY = "DFLASH_TRT_INTERNAL_KEY"  # the request handler shows it to `verify` and `draft`
CLIENT_KEY_VARIABLE = "DFLASH_TRT_CLIENT_KEY"  # by which the word of CLIENT is believed
RUNTIME = "DFLASH_TRT_RUNTIME"  # a directory of mode 0700
GRPC = "DFLASH_TRT_GRPC"  # JSON: how a model reaches its own server, see `Security.for_models`
SOCKET = "control.sock"  # in RUNTIME: see `front/control.py`
CLIENT, CLIENT_KEY = "client", "client-key"  # request parameters: who asks, and the key
MAX_SOCKET_PATH = 107  # bytes, a limit of the system
PROOF = "proof"  # the client of requests that measure what a drafter is worth
LAST_WORDS = 0.2  # seconds in which an answer leaves the process
PR_SET_PDEATHSIG = 1


def new_key() -> str:
    """Return 128 bits that nobody can guess."""
    return secrets.token_hex(16)


def new_runtime() -> Path:
    """Return a new directory for this user alone, where a socket's path is short enough.

    Triton starts no model under a path with a space: in /tmp where TMPDIR does not serve.
    """
    directory = Path(tempfile.mkdtemp(prefix="dflash-trt-"))
    path = bytes(directory / SOCKET)
    if len(path) <= MAX_SOCKET_PATH and not any(chr(byte).isspace() for byte in path):
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="dflash-trt-", dir="/tmp"))


def hide_shared_memory() -> None:
    """Close this process's shared memory to other users: Triton's is 0644 whatever the umask."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, found, name = line.partition("/dev/shm/")
        if found:
            with suppress(FileNotFoundError, PermissionError):  # removed since, or another's
                Path(found, name).chmod(0o600)


def given(name: str) -> str:
    """Return one of the variables above; ServerError when this process was started without."""
    value = os.environ.get(name)
    if not value:
        raise ServerError(
            f"{name} is not in the environment of this Triton server",
            "Start it with `dflash-trt serve`, or set it as docs/serving.md says.",
        )
    return value


def key_tensor() -> Int64:
    """Return the server's key as the internal models take it: 128 bits, shape `[2]`."""
    return np.frombuffer(bytes.fromhex(given(KEY)), np.int64)


def is_key(shown: bytes) -> bool:
    """Return whether these are the bytes of `key_tensor`; a wrong key takes as long to tell."""
    return hmac.compare_digest(shown, bytes.fromhex(given(KEY)))


def client_parameters(client: str, client_key: str) -> dict[str, str]:
    """Return the request parameters by which the application says for whom it asks."""
    return {CLIENT: client, CLIENT_KEY: client_key}


def client_of(parameters: Mapping[str, Any]) -> str:
    """Return who asks, by the application's word; "" for all who come without one."""
    shown = str(parameters.get(CLIENT_KEY, "")).encode()
    key = os.environ.get(CLIENT_KEY_VARIABLE, "").encode()
    trusted = key and hmac.compare_digest(shown, key)
    return str(parameters.get(CLIENT, "")) if trusted else ""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this process get a signal when the one that started it ends; called in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_server() -> None:
    """End this model's process when its tritonserver is gone, even by kill -9.

    PR_SET_PDEATHSIG will not do: it goes by the thread that started the process, which ends.
    """
    server = os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([server], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="server's end", daemon=True).start()


def end_process() -> None:
    """End this process, whose engine is dead, when its answer has left: `serve` restarts it."""
    threading.Timer(LAST_WORDS, os._exit, [1]).start()
