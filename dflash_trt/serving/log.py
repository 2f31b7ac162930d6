"""The log of a server: one file to which Triton and our processes append lines."""

import logging
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from dflash_trt.errors import ServerError
from dflash_trt.serving.tracing import current

TAIL = 65536  # bytes at the end of the log, read for the reason of an exit


class Formatter(logging.Formatter):
    def __init__(self) -> None:
        line = "%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s"
        super().__init__(line, "%Y-%m-%dT%H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request_id", "") or current.get()
        record.request = f" [{request}]" if request else ""
        return super().format(record)


def configure() -> None:
    """Send this process's log to its standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.getLogger("dflash_trt").setLevel("INFO")


class Log:
    """The log file, appended to; processes get `fileno`. ServerError if it is not writable."""

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def add(self, message: str) -> None:
        line = f"{datetime.now().astimezone().isoformat(timespec='seconds')} INFO serve: {message}"
        with suppress(OSError, ValueError):  # a full disk, or closed: the server goes on
            self._file.write(line.encode(errors="replace") + b"\n")

    def is_standard_output(self) -> bool:
        with suppress(OSError):
            return os.path.sameopenfile(self._file.fileno(), 1)
        return False

    def size(self) -> int:
        with suppress(OSError, ValueError):
            return os.fstat(self.fileno()).st_size
        return 0  # no file, such as a pipe

    def since(self, start: int) -> list[str]:
        """Return the lines added since `size` was `start`, only the last if there are many."""
        with suppress(OSError), open(self.path, "rb") as file:
            if file.seekable():
                file.seek(max(start, self.size() - TAIL))
                return file.read(TAIL).decode(errors="replace").splitlines()
        return []

    def close(self) -> None:
        self._file.close()
