"""The socket of the model `dflash`: commands of `serve`, and requests of `dflash_infer`."""

import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


def load_drafter(runtime: Path, engine: Path, timeout: float) -> str:
    """Have the drafter in this directory serve; return why it does not, or "".

    Raises OSError or ValueError without an answer.
    """
    refusal: Any = ask(str(runtime / SOCKET), {"drafter": str(engine)}, timeout)
    return str(refusal)


def new_runtime() -> Path:
    """Return a new directory for this user alone, with a path short enough for a socket."""
    return Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=TEMPORARY))


def socket_path() -> Path:
    """Return the address of the model `dflash` in a process of this server."""
    return Path(env_value(RUNTIME)) / SOCKET
