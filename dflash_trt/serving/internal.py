"""What the processes of one server share and no client has: keys, a directory for a socket."""

import hashlib
import hmac
import os
import secrets
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
GATEWAY_KEY = "DFLASH_TRT_GATEWAY_KEY"  # by which the gateway's word for who asks is believed
RUNTIME = "DFLASH_TRT_RUNTIME"  # a directory of mode 0700
SOCKET = "infer.sock"  # in it: see `front/unary.py`
MAX_SOCKET_PATH = 107  # bytes, a limit of the system
PROOF = "proof"  # the client of requests that `serve` sends to see what a drafter is worth
LAST_WORDS = 0.2  # seconds in which an answer leaves the process


def new_key() -> str:
    """128 bits that nobody can guess."""
    return secrets.token_hex(16)


def new_runtime() -> Path:
    """A new directory for this user alone, where a socket's path is short enough and Triton runs.

    It starts no model under a path with a space. In /tmp where that of TMPDIR does not serve.
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
    """One of the variables above; ServerError when this process was started without."""
    value = os.environ.get(name)
    if not value:
        raise ServerError(
            f"{name} is not in the environment of this Triton server",
            "Start it with `dflash-trt serve`, or set it as docs/operations.md says.",
        )
    return value


def with_key(batch: Int64) -> Int64:
    """The tensor `batch` as the internal models take it: the key's 128 bits come first."""
    return np.concatenate((np.frombuffer(_digest(), np.int64), batch))


def without_key(batch: Int64) -> Int64 | None:
    """The inverse; None without the right key, which takes as long to see for any other."""
    shown = np.ascontiguousarray(batch[:2]).tobytes()
    return batch[2:] if hmac.compare_digest(shown, _digest()) else None


def _digest() -> bytes:
    return hashlib.blake2b(given(KEY).encode(), digest_size=16).digest()


def client_parameters(client: str, gateway_key: str) -> dict[str, str]:
    """The request parameters by which a gateway says for whom it asks: see `client_of`."""
    return {"client": client, "client_key": gateway_key}


def client_of(parameters: Mapping[str, Any]) -> str:
    """Who asks, by the gateway's word; "" for all who come without one."""
    shown = str(parameters.get("client_key", "")).encode()
    key = os.environ.get(GATEWAY_KEY, "").encode()
    trusted = key and hmac.compare_digest(shown, key)
    return str(parameters.get("client", "")) if trusted else ""


def end_process() -> None:
    """Ends this process, whose engine is dead, when its answer has left: `serve` starts another."""
    threading.Timer(LAST_WORDS, os._exit, [1]).start()
