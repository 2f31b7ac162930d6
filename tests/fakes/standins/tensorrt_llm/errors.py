"""What requests fail with; the names are upstream's."""


class RequestError(RuntimeError):
    """The request is not taken."""


class EngineDeadError(RuntimeError):
    """The engine is gone: it is raised from then on."""
