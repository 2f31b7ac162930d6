"""How `dflash-trt swap` reaches the `serve` of the same user: a socket named after the HTTP port.

It has no file: nothing is left of it when `serve` is killed. Either end asks who the other is.
"""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

from dflash_trt.errors import ServerError

Call = dict[str, Any]
Tell = Callable[[str], None]
CALL_TIME = 5.0  # seconds in which a call is made
LONGEST = 1 << 16  # bytes of a call
BUSY = ServerError("a swap is under way", "Wait until it has ended")


class Caller:
    """Takes calls, one at a time, and does each in a thread of its own.

    do: given a call and what tells the caller how far it is; raises ServerError where it fails.
    """

    def __init__(self, http_port: int, do: Callable[[Call, Tell], None]) -> None:
        self._do = do
        self._busy = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(_name(http_port))
        except OSError:
            # a user of this machine took it: nobody can call, and it serves all the same
            self._socket.close()
            return
        self._socket.listen()
        threading.Thread(target=self._accept, name="swap calls", daemon=True).start()

    def close(self, timeout: float) -> None:
        """Takes no more calls, and waits so many seconds for the one that runs."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        self._busy.acquire(timeout=timeout)

    def alone(self, do: Callable[[], None]) -> None:
        """Does it while no call is done; ServerError while one is."""
        if not self._busy.acquire(blocking=False):
            raise BUSY
        try:
            do()
        finally:
            self._busy.release()  # before the caller hears of it, who may come again at once

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        def tell(line: str, kind: str = "say") -> None:
            with suppress(OSError):  # nobody listens any more; the swap goes on
                connection.sendall(json.dumps({kind: line}).encode() + b"\n")

        with closing(connection), suppress(OSError, ValueError):
            if not _is_ours(connection):
                return
            connection.settimeout(CALL_TIME)
            with connection.makefile("rb") as file:
                call = json.loads(file.readline(LONGEST))
            try:
                self.alone(lambda: self._do(call, tell))
                tell("", "done")
            except ServerError as error:
                tell(json.dumps([error.problem, error.fix]), "error")


def call(http_port: int, what: Call) -> Iterator[str]:
    """Has it done, and yields what `serve` tells of it; ServerError where it fails."""
    nobody = ServerError(
        f"no `dflash-trt serve` of yours has HTTP port {http_port}", "Give its port: --http-port"
    )
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        try:
            connection.connect(_name(http_port))
        except OSError:
            raise nobody from None
        if not _is_ours(connection):
            raise nobody
        connection.sendall(json.dumps(what).encode() + b"\n")
        with connection.makefile("rb") as file:
            for line in file:
                ((kind, said),) = json.loads(line).items()
                if kind == "done":
                    return
                if kind == "error":
                    raise ServerError(*json.loads(said))
                yield said
    raise ServerError("`serve` ended before the swap had", "Start it with the build it is to serve")


def _name(http_port: int) -> str:
    return f"\0dflash-trt.{http_port}"


def _is_ours(connection: socket.socket) -> bool:
    """Whether this user, or root, is at the other end."""
    size = struct.calcsize("3i")  # process, user, group
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return user in (0, os.geteuid())
