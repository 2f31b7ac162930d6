"""What `serve` asks and tells the request handler, over the Unix socket of `unary.py`."""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

TIMEOUT = 2.0  # seconds
Command = Literal[
    "status",
    "drain",  # refuse new requests
    "end",  # refuse new requests, end the others with an error
    "hold",  # another drafter is about to be loaded: what is kept is of no use to it
    "release",  # it is there
]


class Status(NamedTuple):
    """The request handler's state."""

    open: int  # sequences that run or wait
    progress: int  # tokens processed since it started


@dataclass(frozen=True)
class Control:
    """The supervisor's end; `path`: of the socket."""

    path: Path

    def ask(self, command: Command) -> Status | None:
        """The state after the command; None without an answer in `TIMEOUT` seconds."""
        with suppress(OSError, ValueError, TypeError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect(str(self.path))
            connection.sendall(json.dumps({"control": command}).encode() + b"\n")
            with connection.makefile("rb") as file:
                return Status(**json.loads(file.readline()))
        return None
