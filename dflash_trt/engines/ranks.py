"""The ranks of an engine: a process each, which step together.

Rank 0 is the process that opens the engine. It starts the others (`Leader`), tells them each step
and runs it with them. They open their own part (`Follower`) and do as they are told. A rank that
ends, or says that it failed, fails the step on rank 0 at once, and with it the engine: a group with
a gap cannot go on. When rank 0 ends, however it does, the others end too.

How ranks put their shares together is the engine's: on CPUs through the memory they share
(`exchange.py`), on GPUs NCCL (`nccl.py`). The inputs of a step pass through that memory on both.
"""

import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from dflash_trt.child import start_module
from dflash_trt.engines.exchange import Exchange, create
from dflash_trt.engines.info import rank_directory
from dflash_trt.engines.load import MODULES, engine_kind
from dflash_trt.engines.step import Engine
from dflash_trt.errors import DflashError, RankError

START_TIMEOUT = 600.0  # seconds: a large model may take minutes to load
SILENCE = 60.0  # seconds that a rank may take from one collective to the next
END_TIMEOUT = 5.0  # seconds: killing a process takes the system a moment
MESSAGE = 4096  # bytes of one, at most
READY = b"ready"
Command = Literal["step", "move_row", "keep_tokens"]
COMMANDS: tuple[Command, ...] = get_args(Command)
AGAIN = "What is wrong with that rank has to be mended first; then start all of them again"


class Leader:
    """Rank 0's side."""

    def __init__(self, directory: Path, ranks: int, hello: bytes = b"-") -> None:
        """Starts the others, which load while the caller does, until `wait_ready`.

        hello: what each of them is told first, such as an id to find each other by.
        """
        self._directory, self._ranks = directory, ranks
        self._failure: RankError | None = None
        self._links: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._links, self._processes)
        memory = create(ranks)
        try:
            self.exchange = Exchange(memory, 0, ranks)
            for rank in range(1, ranks):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._links.append(ours)
                with theirs:
                    ours.send(hello)
                    link = theirs.fileno()
                    words = (directory, rank, ranks, link, memory)
                    self._processes.append(start_module(__name__, *words, fds=(link, memory)))
        finally:
            os.close(memory)

    def wait_ready(self) -> None:
        """Until all have loaded; RankError with what one of them says instead."""
        deadline = time.monotonic() + START_TIMEOUT
        for rank, link in enumerate(self._links, 1):
            link.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                said = link.recv(MESSAGE)
            except TimeoutError:
                said = f"was not ready after {START_TIMEOUT:.0f} s".encode()
            except ConnectionError:
                said = b""
            link.settimeout(None)
            if said != READY:
                raise self._fail(rank, said)

    def run(self, command: Command, numbers: tuple[int, ...], run: Callable[[], object]) -> None:
        """Have all ranks call this method of their engine (and run the step); `run`: this one's."""
        if self._failure is not None:
            raise self._failure
        message = struct.pack(f"{1 + len(numbers)}q", COMMANDS.index(command), *numbers)
        try:
            for link in self._links:
                link.send(message, socket.MSG_NOSIGNAL)
            run()
        except RankError:
            raise
        except BaseException as error:  # whatever it is, the others are in the middle of a step
            self.check(0, 0.0)
            self._fail(0, f"{type(error).__name__}: {error}".encode())
            raise

    def check(self, awaited: int, seconds: float) -> None:
        """RankError if a rank is gone, or has not done for long what it is awaited for."""
        for rank, link in enumerate(self._links, 1):
            if (said := _heard(link)) is not None:
                raise self._fail(rank, said)
        if seconds > SILENCE:
            raise self._fail(awaited, f"did not answer for {SILENCE:.0f} s".encode())

    def _fail(self, rank: int, said: bytes) -> RankError:
        """Ends the others; the error of this call and of all that follow."""
        why = said.decode(errors="replace") or self._last_of(rank)
        name = f"rank {rank} of {self._ranks} of the engine {self._directory}"
        self._failure = RankError(f"{name} failed: {why}", AGAIN)
        self._end()
        return self._failure

    def _last_of(self, rank: int) -> str:
        """How a process ended that closed its link without a word."""
        try:
            code = self._processes[rank - 1].wait(1)
        except subprocess.TimeoutExpired:
            return "it no longer listens"
        if code >= 0:
            return f"exit {code}"
        return f"ended by {signal.Signals(-code).name}, as when memory runs out"


class Follower:
    """The side of another rank, in its own process."""

    def __init__(self, link: socket.socket, exchange: Exchange) -> None:
        self.exchange = exchange
        self._link = link
        self.hello = link.recv(MESSAGE)

    def serve(self, engine: Engine) -> None:
        """Do as rank 0 says, until it is gone."""
        self._link.send(READY)
        while message := self._link.recv(MESSAGE):
            what, *numbers = struct.unpack(f"{len(message) // 8}q", message)
            command = COMMANDS[what]
            if command == "step":
                engine.step(*numbers).run()
            elif command == "move_row":
                engine.move_row(*numbers)
            else:
                row, start, *kept = numbers
                engine.keep_tokens(row, start, kept)

    def check(self, awaited: int, seconds: float) -> None:
        """ConnectionResetError if rank 0 is gone."""
        if _heard(self._link, socket.MSG_PEEK) == b"":
            raise ConnectionResetError


def _end(links: "list[socket.socket]", processes: "list[subprocess.Popen[bytes]]") -> None:
    for link in links:
        link.close()
    for process in processes:
        process.kill()  # they hold nothing that must be saved
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT)


def _heard(link: socket.socket, flags: int = 0) -> bytes | None:
    """A message that is there, b"" when the other side is gone, None when there is nothing."""
    try:
        return link.recv(MESSAGE, flags | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def main() -> None:
    """`python -m dflash_trt.engines.ranks DIRECTORY RANK RANKS LINK MEMORY`."""
    directory, (rank, ranks, fd, memory) = Path(sys.argv[1]), map(int, sys.argv[2:])
    link = socket.socket(fileno=fd)
    try:
        follower = Follower(link, Exchange(memory, rank, ranks))
        own = rank_directory(directory, rank)
        follower.serve(importlib.import_module(MODULES[engine_kind(own)]).Engine(own, follower))
    except ConnectionError:  # rank 0 is gone
        pass
    except Exception as error:
        said = str(error) if isinstance(error, DflashError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            link.send(said.encode()[:MESSAGE], socket.MSG_NOSIGNAL)
    os._exit(0)  # whatever the runtime would still like to tidy up


if __name__ == "__main__":
    main()
