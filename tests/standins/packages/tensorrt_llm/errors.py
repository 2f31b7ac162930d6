"""What requests fail with; the names are upstream's."""


class RequestError(RuntimeError):
    """The request is refused."""


class EngineDeadError(RuntimeError):
    """The engine is gone; every later call raises this too."""
