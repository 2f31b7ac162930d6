"""Errors for users, with the problem and a fix."""

from collections.abc import Iterator
from contextlib import contextmanager


class DflashError(Exception):
    """Error with a problem (naming the file, field or value) and a fix for the user."""

    exit_code = 1

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem.strip()
        self.fix = fix.strip()

    def __str__(self) -> str:
        return f"{_with_one_stop(self.problem)} {_with_one_stop(self.fix)}"


class ConfigError(DflashError):
    """The build config is invalid."""

    exit_code = 2


class CheckpointError(DflashError):
    """A target or drafter directory is unreadable or unsupported."""


class PairError(DflashError):
    """The target and the drafter do not belong together."""


class BuildError(DflashError):
    """A build cannot start or finish."""


class EngineError(DflashError):
    """An engine cannot be built, loaded or stepped."""


class ServerError(DflashError):
    """The Triton server cannot start or cannot be reached."""


class UnavailableError(ServerError):
    """The server refuses requests now: it is full, down or stopping."""


class DeadlineError(ServerError):
    """The request took longer than its `timeout`."""


class RequestError(DflashError):
    """A prompt or a sampling value is invalid."""


class BenchError(DflashError):
    """A benchmark cannot be run or compared."""


def _with_one_stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError if the block panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which no module exports
            raise
        raise RuntimeError(f"the tokenizer panicked: {error}") from error
