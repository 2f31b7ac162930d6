"""Connections: how many there may be, and how long each may stall."""

import asyncio
import resource
from functools import lru_cache
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIME = 10.0  # seconds for a request's headers
WRITE_TIME = 60.0  # seconds in which a client must take something of its answer
RESERVED = 128  # file descriptors for other things, and for connections accepted in one go
BACKLOG = 64  # connections accepted in one go
MAX_CONNECTIONS = 2000
MAX_PIECES = 10_000  # of a body: parsing one takes about 20 us
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


@lru_cache
def limit() -> int:
    """Connections that may be open over HTTP, and as many over gRPC; each takes a file descriptor,
    and another one to Triton."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(MAX_CONNECTIONS, (soft - RESERVED) // 4))


class Parser(h11.Connection):
    """Refuses a body in very many pieces, each of which takes time."""

    _pieces = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            if self._pieces > MAX_PIECES:
                raise h11.RemoteProtocolError("a body in too many pieces")
        return event


class Connection(H11Protocol):
    """uvicorn's, closed where it stalls; over the limit the one that idles longest is closed."""

    connections: set["Connection"]  # type: ignore[assignment]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Parser(h11.SERVER)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()

    @property
    def _active(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > limit():
            idle = [each for each in self.connections if not each._active]
            oldest = min(idle, key=lambda each: each._idle_since)
            if oldest is self:
                transport.write(FULL)
            oldest.transport.close()
            self.connections.discard(oldest)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIME, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        if self._active and self.cycle.response_started:  # what is wrong is the rest of a body
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _watch(self) -> None:
        """Gives headers their time, from their first byte or the connection's start."""
        if self._active and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif not self._active and self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIME, self._late)

    def _late(self) -> None:
        self._header_timer = None
        if not self._active:
            self.transport.close()
