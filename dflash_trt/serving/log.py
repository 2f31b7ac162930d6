"""The log of a server: one file, lines of one format, whichever process wrote them.

Processes write to a pipe that `serve` reads: ours an `Event` as JSON in a line, Triton in its form.
"""

import fcntl
import json
import logging
import os
import re
import select
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal

from dflash_trt.errors import ServerError
from dflash_trt.serving.lines import FLUSH_TIMEOUT, LineWriter, open_for_lines
from dflash_trt.serving.tracing import current

LogFormat = Literal["text", "json"]
EVENTS = "DFLASH_TRT_LOG_EVENTS"  # set for processes whose lines `serve` reads
RECENT = 1000  # events kept for the reason of an exit
PIECE = 2**16  # bytes
LONGEST = 2**20  # bytes of a line; what is longer is cut in two
PIPE_SIZE = 2**20  # bytes that processes may be ahead
IDLE = 0.05  # seconds without a line, after which what a process wrote has been read
TRITON = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ \S+\] (.*)")
LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
TABLE = ("+--", "| ", "|-")  # Triton's tables of models and options, which its other lines repeat


@dataclass(frozen=True)
class Event:
    time: str  # ISO 8601
    level: str
    logger: str
    message: str
    request_id: str = ""

    def as_text(self) -> str:
        request = f" [{self.request_id}]" if self.request_id else ""
        return f"{self.time} {self.level} {self.logger}: {self.message}{request}"

    def as_json(self, build: str) -> str:
        """Return a line for log collectors; build: the digest of what is served."""
        fields = {
            "time": self.time,
            "level": self.level,
            "logger": self.logger,
            "event": self.message,
            "build": build,
        }
        if self.request_id:
            fields["request_id"] = self.request_id
        return json.dumps(fields)


class Formatter(logging.Formatter):
    """Lines of text, or events for `serve`."""

    def format(self, record: logging.LogRecord) -> str:
        event = Event(
            _iso(record.created),
            record.levelname,
            record.name,
            super().format(record),
            getattr(record, "request_id", "") or current.get(),
        )
        return json.dumps(vars(event)) if os.environ.get(EVENTS) else event.as_text()


def configure() -> None:
    """Send this process's log to its standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.getLogger("dflash_trt").setLevel("INFO")


def read_event(line: str) -> Event | None:
    """Return the event of a process's line; None for a line that tells nothing."""
    if line.startswith('{"time": '):
        with suppress(ValueError, TypeError):
            return Event(**json.loads(line))
    if _tells_nothing(line):
        return None
    of_triton = TRITON.fullmatch(line)
    if of_triton is None:
        return Event(_iso(time.time()), "INFO", "output", line)
    message = of_triton[2]
    with suppress(ValueError):
        message = str(json.loads(message)) if message.startswith('"') else message
    if _tells_nothing(message):
        return None
    return Event(_iso(time.time()), LEVELS[of_triton[1]], "triton", message)


def _tells_nothing(text: str) -> bool:
    return not text.strip() or text.strip().startswith(TABLE)


class Log:
    """The log file, appended to; processes get `fileno`. ServerError if it is not writable."""

    def __init__(self, path: Path, form: LogFormat = "text", build: str = "") -> None:
        self.path = path
        self.form = form
        self._build = build
        try:
            self._lines = LineWriter(open_for_lines(path), self._lost_lines)
        except OSError as error:
            raise ServerError(
                f"cannot write the log {path}: {error.strerror}", "Give another --log-file"
            ) from error
        self._recent: deque[Event] = deque(maxlen=RECENT)
        self._count = 0  # of all events
        self._lock = threading.Lock()  # of the last two
        self._reading, self._writing = os.pipe()
        with suppress(OSError):  # the user has too many large pipes
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._read, name="log", daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that writes here."""
        return {EVENTS: "1"}

    def fileno(self) -> int:
        return self._writing

    def own_writer(self) -> BinaryIO:
        """Return another way in, for a program that makes its output non-blocking.

        With `fileno` that would be the output of all.
        """
        return open(f"/proc/self/fd/{self._writing}", "wb", 0)

    def add(self, message: str) -> None:
        self._write(Event(_iso(time.time()), "INFO", "serve", message))

    @property
    def lost(self) -> int:
        """Lines that could not be written: the log's reader or disk stands still, or is gone."""
        return self._lines.lost

    def is_standard_output(self) -> bool:
        with suppress(OSError):
            return os.path.sameopenfile(self._lines.descriptor, 1)
        return False

    def count(self) -> int:
        """Return the number of events so far, see `since`."""
        return self._count

    def since(self, start: int) -> list[Event]:
        """Return the events added since `count` was `start`, only the last if there are many."""
        self._wait_idle()
        with self._lock:
            new = self._count - start
            return list(self._recent)[-new:] if new > 0 else []

    def flush(self) -> None:
        """Wait a moment until what processes have written is in the file."""
        self._wait_idle()
        self._lines.flush()

    def close(self) -> None:
        self._wait_idle()
        os.close(self._writing)
        self._thread.join(FLUSH_TIMEOUT)
        self._lines.close()

    def _wait_idle(self) -> None:
        """Wait until what processes have written is read, at most `FLUSH_TIMEOUT`."""
        self._idle.clear()
        self._idle.wait(FLUSH_TIMEOUT)

    def _read(self) -> None:
        left = b""
        while True:
            if not select.select([self._reading], [], [], IDLE)[0]:
                self._idle.set()
                continue
            piece = os.read(self._reading, PIECE)
            if not piece:
                break
            *lines, left = (left + piece).split(b"\n")
            if len(left) > LONGEST:
                lines.append(left)
                left = b""
            for line in lines:
                event = read_event(line.decode(errors="replace"))
                if event is not None:
                    self._write(event, may_wait=True)
        os.close(self._reading)

    def _write(self, event: Event, *, may_wait: bool = False) -> None:
        with self._lock:
            self._recent.append(event)
            self._count += 1
        self._lines.write(self._as_line(event), may_wait=may_wait)

    def _as_line(self, event: Event) -> bytes:
        line = event.as_json(self._build) if self.form == "json" else event.as_text()
        return line.encode(errors="replace") + b"\n"

    def _lost_lines(self, count: int) -> bytes:
        message = f"{count} lines were lost here: the log's reader or disk stood still"
        return self._as_line(Event(_iso(time.time()), "WARNING", "serve", message))


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")
