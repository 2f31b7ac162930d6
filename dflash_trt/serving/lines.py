"""Lines to a file, pipe or device whose reader may stand still or leave: nobody waits for it."""

import atexit
import io
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

WAITING = 2**22  # bytes of lines that wait to be written; more are lost
STALLED = 1.0  # seconds without progress of a full plain file, after which lines are lost
RETRY = 1.0  # seconds between two tries to say what was lost
FLUSH_TIMEOUT = 1.0  # seconds
MOST_LINKS = 40


class _Line(NamedTuple):
    content: bytes
    tells_of: int = 0  # lost lines, if it is a notice


class LineWriter:
    """Writes lines to a descriptor in a thread of its own, and counts those that are lost.

    notice: the line that says, once writing is possible again, how many were lost.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], bytes]) -> None:
        self.descriptor = descriptor
        self.lost = 0  # lines
        self._notice = notice
        self._unsaid = 0  # of the lost lines, those that no notice tells of
        self._lines: deque[_Line] = deque()
        self._size = 0  # bytes of `_lines`
        self._changed = threading.Condition()  # of all these
        self._is_stalled = False
        self._is_writing = False
        self._closing = False
        self._has_half_line = False  # at the end of what was written
        # a disk is as fast as it is; a reader may take its time
        self._waits_when_full = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def write(self, content: bytes, *, may_wait: bool = False) -> None:
        """Have a line written; may_wait: for a disk that is slower than the lines come."""
        with self._changed:
            if may_wait and self._waits_when_full and not self._is_stalled:
                self._is_stalled = not self._changed.wait_for(self._has_room, STALLED)
            line = _Line(content)
            if not self._has_room():
                self._lose(line)
                return
            if self._unsaid:
                self._append(self._take_notice())
            self._append(line)

    def flush(self, seconds: float = FLUSH_TIMEOUT) -> bool:
        """Wait until all lines are written or lost; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, seconds)

    def close(self) -> None:
        """Write what can be written soon, and close the descriptor if nothing holds it up.

        A plain file gets all lines, however slow its disk is, while it takes some.
        """
        is_idle = self.flush()
        goes_on = self._waits_when_full
        while goes_on and not is_idle:
            size = self._size
            is_idle = self.flush()
            goes_on = self._size < size
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if is_idle:
            self._thread.join(FLUSH_TIMEOUT)
            os.close(self.descriptor)

    def _has_room(self) -> bool:
        return self._size < WAITING

    def _append(self, line: _Line) -> None:
        self._lines.append(line)
        self._size += len(line.content)
        self._changed.notify_all()

    def _take_notice(self) -> _Line:
        notice = _Line(self._notice(self._unsaid), self._unsaid)
        self._unsaid = 0
        return notice

    def _lose(self, line: _Line) -> None:
        self.lost += not line.tells_of
        self._unsaid += line.tells_of or 1

    def _run(self) -> None:
        while (line := self._next()) is not None:
            written = self._put(line.content)
            with self._changed:
                self._is_writing = False
                self._is_stalled = self._is_stalled and not written
                if not written:
                    self._lose(line)
                self._changed.notify_all()
                if line.tells_of and not written:
                    self._changed.wait_for(lambda: self._lines or self._closing, RETRY)

    def _next(self) -> _Line | None:
        """Wait for a line, or for lost ones that can be told of; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._unsaid or self._closing)
            if self._closing:
                return None
            self._is_writing = True
            if not self._lines:
                return self._take_notice()
            line = self._lines.popleft()
            self._size -= len(line.content)
            self._changed.notify_all()
            return line

    def _put(self, content: bytes) -> bool:
        left = memoryview(b"\n" + content if self._has_half_line else content)
        whole = len(left)
        while left:
            try:
                left = left[os.write(self.descriptor, left) :]
            except BlockingIOError:  # who shares the descriptor made it so
                select.select([], [self.descriptor], [], RETRY)
            except OSError:  # nobody reads it, or the disk is full
                self._has_half_line = self._has_half_line or 0 < len(left) < whole
                return False
        self._has_half_line = False
        return True


class _Output(io.TextIOBase):
    """Standard output or error whose lines are written by a `LineWriter`."""

    encoding = "utf-8"

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._begun = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._writer.descriptor

    def isatty(self) -> bool:
        return os.isatty(self._writer.descriptor)

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._writer.write(f"{line}\n".encode(errors="replace"))
        return len(text)


def detach_outputs() -> None:
    """Have standard output and error written by threads, to the end of the process.

    A `print` then neither waits nor fails, whatever became of the reader.
    """
    sys.stdout, sys.stderr = (_detached(stream) for stream in (sys.stdout, sys.stderr))


def _detached(stream: TextIO | None) -> Any:
    """Return a stream in the place of one that has a descriptor."""
    if stream is None or isinstance(stream, _Output):  # closed before the start
        return stream
    try:
        stream.flush()
        descriptor = os.dup(stream.fileno())
    except OSError:  # a stream in memory, or nobody reads it already
        return stream
    writer = LineWriter(descriptor, _lost_lines)
    atexit.register(writer.flush)
    return _Output(writer)


def _lost_lines(count: int) -> bytes:
    return f"warning: {count} lines were lost here: nobody read them\n".encode()


# --- where lines go -----------------------------------------------------------------------------


def own_descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path leads to, as /dev/stdout does."""
    place = os.path.abspath(path)
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(place)
        if os.path.realpath(folder) == f"/proc/{os.getpid()}/fd":
            return int(name) if name.isdigit() else None
        try:
            place = os.path.join(folder, os.readlink(place))
        except OSError:  # no link, or another user's
            return None
    return None


def open_for_lines(path: Path) -> int:
    """Return a descriptor that lines are appended to; OSError if that is impossible.

    Does not wait for the reader of a pipe.
    """
    descriptor = own_descriptor(path)
    if descriptor is not None and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.dup(descriptor)
    if path.is_fifo():
        return os.open(path, os.O_RDWR)  # by Linux, without a reader, too
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o600)
