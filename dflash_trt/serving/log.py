"""The log of a server: one file to which Triton and our processes append lines.

Our processes write text, or JSON objects with `--log-format json`; Triton has its own format.
"""

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dflash_trt.errors import ServerError
from dflash_trt.serving.tracing import current

Form = Literal["text", "json"]
FORM = "DFLASH_TRT_LOG_FORMAT"  # environment variable of our processes
TAIL = 65536  # bytes at the end of the log, read for the reason of an exit


def to_line(form: Form, level: str, logger: str, message: str, more: Mapping[str, Any]) -> str:
    """Return one line with the time; more: further fields, of which text shows the request id."""
    time = datetime.now().astimezone().isoformat(timespec="milliseconds")
    if form == "json":
        fields = {"time": time, "level": level, "logger": logger, "message": message, **more}
        return json.dumps(fields, ensure_ascii=False)
    request = f" [{more['request_id']}]" if "request_id" in more else ""
    return f"{time} {level} {logger}: {message}{request}"


class Formatter(logging.Formatter):
    """Adds the request's id and the `fields` of a record's `extra`."""

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
    """Send this process's log to its standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("json" if os.environ.get(FORM) == "json" else "text"))
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.getLogger("dflash_trt").setLevel("INFO")
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel("WARNING")


class Log:
    """The log file, appended to; processes get `fileno`. ServerError if it is not writable."""

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

    def fileno(self) -> int:
        return self._file.fileno()

    def add(self, level: str, logger: str, message: str, **more: Any) -> None:
        line = to_line(self.form, level, logger, message, more)
        with suppress(OSError, ValueError):  # a full disk, or closed: the server goes on
            self._file.write(line.encode(errors="replace") + b"\n")

    def is_output(self) -> bool:
        """Return whether the log is this process's own standard output."""
        with suppress(OSError):
            return os.path.sameopenfile(self._file.fileno(), 1)
        return False

    def size(self) -> int:
        """Return its size in bytes; 0 if it is no file, such as a pipe."""
        with suppress(OSError, ValueError):
            return os.fstat(self.fileno()).st_size
        return 0

    def since(self, start: int) -> list[str]:
        """Return the lines added since `size` was `start`, only the last if there are many."""
        with suppress(OSError), open(self.path, "rb") as file:
            if file.seekable():
                file.seek(max(start, self.size() - TAIL))
                return file.read(TAIL).decode(errors="replace").splitlines()
        return []

    def close(self) -> None:
        self._file.close()
