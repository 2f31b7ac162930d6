"""Secrets and paths that the processes of one server share: keys and the control socket."""

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

KEY = "DFLASH_TRT_INTERNAL_KEY"  # the request handler sends it to `verify` and `draft`
CLIENT_KEY_VARIABLE = "DFLASH_TRT_CLIENT_KEY"  # proves that CLIENT comes from the application
RUNTIME = "DFLASH_TRT_RUNTIME"  # a directory of mode 0700
SOCKET = "control.sock"  # in RUNTIME: see `front/control.py`
CLIENT, CLIENT_KEY = "client", "client-key"  # request parameters: who asks, and the key
PROOF = "proof"  # the client name of requests that measure a drafter
LAST_WORDS = 0.2  # seconds for an answer to leave the process
PR_SET_PDEATHSIG = 1


def new_key() -> str:
    return secrets.token_hex(16)


def new_runtime() -> Path:
    """Return a new directory for this user alone, with a path short enough for a socket."""
    return Path(tempfile.mkdtemp(prefix="dflash-trt-", dir="/tmp"))


def hide_shared_memory() -> None:
    """Restrict this process's shared memory to its user: Triton makes it 0644 in any umask."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, found, name = line.partition("/dev/shm/")
        if found:
            with suppress(FileNotFoundError, PermissionError):  # removed since, or another's
                Path(found, name).chmod(0o600)


def env_value(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ServerError(
            f"{name} is not in the environment of this Triton server",
            "Start it with `dflash-trt serve`, or set it as docs/serving.md says.",
        )
    return value


def key_tensor() -> Int64:
    """Return the server's key for the internal models: 128 bits, shape `[2]`."""
    return np.frombuffer(bytes.fromhex(env_value(KEY)), np.int64)


def is_key(shown: bytes) -> bool:
    return hmac.compare_digest(shown, bytes.fromhex(env_value(KEY)))


def client_parameters(client: str, client_key: str) -> dict[str, str]:
    return {CLIENT: client, CLIENT_KEY: client_key}


def client_of(parameters: Mapping[str, Any]) -> str:
    """Return the client that the application names; "" without its key."""
    shown = str(parameters.get(CLIENT_KEY, "")).encode()
    key = os.environ.get(CLIENT_KEY_VARIABLE, "").encode()
    trusted = key and hmac.compare_digest(shown, key)
    return str(parameters.get(CLIENT, "")) if trusted else ""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this process signalled when its parent ends; call it in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_server() -> None:
    """End this model's process when its tritonserver is gone, even by kill -9.

    PR_SET_PDEATHSIG does not work: it follows the thread that started the process, which ends.
    """
    server = os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([server], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="server's end", daemon=True).start()


def end_process() -> None:
    """End this process with its dead engine once its answer is sent: `serve` restarts it."""
    threading.Timer(LAST_WORDS, os._exit, [1]).start()
