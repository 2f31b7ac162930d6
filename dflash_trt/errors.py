"""The errors a user can see. Each says what is wrong and what to do next."""


class DflashError(Exception):
    """problem: what is wrong, naming the file, field or value; fix: what the user does about it."""

    exit_code = 1

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem.strip()
        self.fix = fix.strip()

    def __str__(self) -> str:
        """Both as one paragraph of two sentences."""
        return f"{_sentence(self.problem)} {_sentence(self.fix)}"


class ConfigError(DflashError):
    """The build config is wrong."""

    exit_code = 2


class CheckpointError(DflashError):
    """A target or drafter directory cannot be read, or holds something not handled."""


class PairError(DflashError):
    """The target and the drafter do not belong together."""


class BuildError(DflashError):
    """A build cannot start or finish."""


class EngineError(DflashError):
    """An engine cannot be built, loaded or stepped."""


class ServerError(DflashError):
    """The Triton server cannot start or cannot be reached."""


class UnavailableError(ServerError):
    """The server cannot take the request now: its queue is full, it is down or it is stopping."""


class DeadlineError(ServerError):
    """The request took longer than its `timeout`."""


class RequestError(DflashError):
    """A prompt or a sampling value is not acceptable."""


class BenchError(DflashError):
    """A benchmark cannot be run or compared."""


def _sentence(text: str) -> str:
    """End with exactly one stop, so that two of them read as a paragraph."""
    return text if text.endswith((".", "!", "?")) else text + "."
