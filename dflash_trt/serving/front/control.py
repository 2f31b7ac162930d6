"""What `serve` asks of the front model and tells it, over the socket of plain requests."""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

TIMEOUT = 2.0  # seconds
Command = Literal[
    "status",
    "drain",  # takes no more requests
    "end",  # ends those that are left with an error
]


class Status(NamedTuple):
    """What the front model says of itself."""

    open: int  # sequences taken and not yet answered
    progress: int  # tokens processed since it started


@dataclass(frozen=True)
class Control:
    """The supervisor's end; `socket`: the path of the front model's Unix socket."""

    path: Path

    def ask(self, command: Command) -> Status | None:
        """The state after `command` was obeyed; None without an answer in `TIMEOUT` seconds."""
        with suppress(OSError, ValueError, TypeError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect(str(self.path))
            connection.sendall(json.dumps({"control": command}).encode() + b"\n")
            with connection.makefile("rb") as file:
                return Status(**json.loads(file.readline()))
        return None
