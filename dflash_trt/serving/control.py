"""The socket of the model `dflash`: commands of `serve`, and requests of `dflash_infer`."""

import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from dflash_trt.serving.channel import TIMEOUT, ask
from dflash_trt.serving.keys import env_value

RUNTIME = "DFLASH_TRT_RUNTIME"  # names a directory of mode 0700
TEMPORARY = Path("/tmp")  # whatever TMPDIR is: Triton uses it, too, and a socket's path is short
RUNTIME_PREFIX = "dflash-trt-"
SOCKET = "dflash.sock"  # in it
Command = Literal[
    "status",
    "drain",  # refuse new requests
    "end",  # refuse new requests, end the others with an error
    "hold",  # a new drafter is about to load: hold the prefix cache, which it has not seen
    "release",  # it may have loaded: running texts go on without drafts
    "keep",  # it did not load: the old one drafts on
]


class HandlerStatus(NamedTuple):
    open: int  # sequences that run or wait
    progress: int  # tokens processed since it started


def send_command(runtime: Path, command: Command) -> HandlerStatus | None:
    """Return the state after the command; None without an answer in `TIMEOUT` seconds."""
    try:
        return HandlerStatus(*ask(str(runtime / SOCKET), {"command": command}, TIMEOUT))
    except (OSError, ValueError, TypeError):
        return None


def new_runtime() -> Path:
    """Return a new directory for this user alone, with a path short enough for a socket."""
    return Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=TEMPORARY))


def socket_path() -> Path:
    """Return the address of the model `dflash` in a process of this server."""
    return Path(env_value(RUNTIME)) / SOCKET
