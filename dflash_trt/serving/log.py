"""What the processes of a server say: lines of one file, as text or each a JSON object.

`serve` reads what they write, so that Triton's lines and those of libraries have the same form.
Our own processes write JSON to it, and text where nobody reads it so: under a bare Triton.
"""

import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from dflash_trt.errors import ServerError
from dflash_trt.serving.request_id import current

Form = Literal["text", "json"]
FORM = "DFLASH_TRT_LOG_FORMAT"  # in the environment of a process of ours
KEPT = 1000  # last lines of a process: they say why it ended
LAST_WORDS = 2.0  # seconds until the last line of an ended process was read
TRITON = re.compile(r"(?P<level>[IWEF])\d{4} [\d:.]+ \d+ (?P<message>[\w.]+:\d+\] .*)")
LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}


def to_line(form: Form, level: str, logger: str, message: str, more: Mapping[str, Any]) -> str:
    """One line, with the time; more: further fields, of which text has the request id alone."""
    time = datetime.now().astimezone().isoformat(timespec="milliseconds")
    if form == "json":
        said = {"time": time, "level": level, "logger": logger, "message": message, **more}
        return json.dumps(said, ensure_ascii=False)
    request = f" [{more['request_id']}]" if "request_id" in more else ""
    return f"{time} {level} {logger}: {message}{request}"


class Formatter(logging.Formatter):
    """fields: what a record has beside its message, in its `extra`; the request's id is known."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        more = dict(getattr(record, "fields", {}))
        if request := getattr(record, "request_id", "") or current.get():
            more["request_id"] = request
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        return to_line(self._form, record.levelname, record.name, message, more)


def configure() -> None:
    """Lets this process say what it has to say on its standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("json" if os.environ.get(FORM) == "json" else "text"))
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.getLogger("dflash_trt").setLevel("INFO")


class Log:
    """The file; lines are added to what it holds. ServerError when it cannot be written."""

    def __init__(self, path: Path, form: Form = "text") -> None:
        self.path = path
        self.form = form
        try:
            self._file = open(  # noqa: SIM115
                path, "ab", 0, opener=lambda name, how: os.open(name, how, 0o600)
            )
        except OSError as error:
            raise ServerError(
                f"cannot write the log {path}: {error.strerror}", "Give another --log-file"
            ) from error

    def add(self, level: str, logger: str, message: str, **more: Any) -> None:
        line = to_line(self.form, level, logger, message, more)
        with suppress(OSError, ValueError):  # a full disk, or closed: the server goes on
            self._file.write(line.encode(errors="replace") + b"\n")

    def is_output(self) -> bool:
        """Whether it is where this process's own output goes."""
        with suppress(OSError):
            return os.path.sameopenfile(self._file.fileno(), 1)
        return False

    def close(self) -> None:
        self._file.close()


class Said:
    """The lines of one process and its children, on their way into the log."""

    def __init__(self, log: Log, name: str) -> None:
        """name: of those lines that do not say who wrote them."""
        self._log = log
        self._name = name
        self._level = "INFO"  # a line without one goes on with the last
        self._last = deque[str](maxlen=KEPT)
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(target=self._follow, name=f"log of {name}", daemon=True)
        self._thread.start()

    @contextmanager
    def end(self) -> Iterator[int]:
        """What the process is given as its output, within the block that starts it."""
        try:
            yield self._write
        finally:
            os.close(self._write)

    def last(self) -> list[str]:
        """The last lines as they were written, those of an ended process to the very last."""
        self._thread.join(LAST_WORDS)
        return list(self._last)

    def _follow(self) -> None:
        with open(self._read, errors="replace") as lines:
            for line in lines:
                self._last.append(line.rstrip("\n"))
                self._log.add(**self._understood(line.rstrip("\n")))

    def _understood(self, line: str) -> dict[str, Any]:
        if line.startswith('{"time": '):
            with suppress(ValueError):
                said = cast(dict[str, Any], json.loads(line))
                del said["time"]  # it is a moment ago
                if said.keys() >= {"level", "logger", "message"}:
                    return said
        if found := TRITON.fullmatch(line):
            self._level = LEVELS[found["level"]]
            line = found["message"]
        return {"level": self._level, "logger": self._name, "message": line}
