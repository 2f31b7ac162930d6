"""A chat template in a process of its own, limited in time and memory.

Templates are programs from a checkpoint, run on what clients send. A process that was ended
(`template_process.py`) is started again when it is needed; it also ends with its parent.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import threading
import weakref
from contextlib import suppress
from typing import Any

from dflash_trt.child import start_module
from dflash_trt.errors import CheckpointError, RequestError

SECONDS = 2  # of processor time, for one text
MEMORY = 512 << 20  # bytes, beside those of the idle process
MAX_BYTES = 64 << 20  # of a message to or from the process
START_TIMEOUT, TIMEOUT = 60.0, 10.0  # seconds of wall time, for busy machines
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # not the server's keys
MODULE = "dflash_trt.chat.template_process"
DONE, REFUSED, TOO_MUCH = b"+", b"-", b"!"  # how an answer begins


class LimitError(RequestError):
    """The template took too much time or memory."""


class Template:
    """`template(messages=.., **values)` renders; RequestError where it refuses or takes too much.

    One text at a time, whichever thread asks.
    """

    def __init__(self, source: str) -> None:
        """CheckpointError when it is not valid."""
        self._source, self._lock = source.encode(errors="surrogatepass"), threading.Lock()
        state, text = self._start()
        if state != DONE:
            raise CheckpointError(
                f"the chat template is not valid ({text})", "Download or export the tokenizer again"
            )

    def __call__(self, **values: Any) -> str:
        data = json.dumps(values).encode()
        with self._lock:
            state, text = (DONE, "") if self._end.alive else self._start()
            if state == DONE:
                state, text = self._ask(data, TIMEOUT)
        if state == DONE:
            return text
        raise (LimitError if state == TOO_MUCH else RequestError)(
            f"the chat template refuses the messages: {text}",
            "Send roles and fields that the model's chat template knows",
        )

    def _start(self) -> tuple[bytes, str]:
        self._link, theirs = socket.socketpair()
        fd, known = theirs.fileno(), {k: v for k, v in os.environ.items() if k in VARIABLES}
        with theirs:
            process = start_module(MODULE, fd, fds=(fd,), environment=known)
        self._process, self._end = process, weakref.finalize(self, _end, self._link, process)
        state, text = self._ask(self._source, START_TIMEOUT)
        if state != DONE:
            self._end()
        return state, text

    def _ask(self, data: bytes, timeout: float) -> tuple[bytes, str]:
        if len(data) > MAX_BYTES:
            return TOO_MUCH, f"they have more than {MAX_BYTES >> 20} MiB"
        self._link.settimeout(timeout)
        try:
            send(self._link, data)
            answer = receive(self._link)
        except OSError:
            answer = b""
        if not answer:
            self._end()
            late = self._process.returncode in (-signal.SIGPROF, -signal.SIGKILL)
            why = f"takes more than {SECONDS} s" if late else f"ended ({self._process.returncode})"
            return TOO_MUCH, f"it {why}"
        return answer[:1], answer[1:].decode()


def send(link: socket.socket, data: bytes) -> None:
    # no SIGPIPE when the other side is gone: Triton's processes might not ignore it
    link.sendall(struct.pack("!Q", len(data)) + data, socket.MSG_NOSIGNAL)


def receive(link: socket.socket) -> bytes:
    """A message, b"" when the other side is gone."""
    with link.makefile("rb") as stream:
        header = stream.read(8)
        size = struct.unpack("!Q", header)[0] if len(header) == 8 else 0
        return stream.read(size) if size <= MAX_BYTES + 1 else b""


def _end(link: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    link.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.5)  # it ends by itself, unless it hangs
    process.kill()
    process.wait()
