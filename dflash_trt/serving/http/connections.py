"""Connections of the HTTP application: how many may be open, and how long one may keep silent.

uvicorn waits for headers without limits of time or size, and refuses everybody's requests while
others' connections are too many. Here the connection that has waited longest without a request
makes room for a new one.
"""

import asyncio
import resource
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_TIME = (
    10.0  # seconds from a connection, or a request's first byte, to the end of its headers
)
HEADER_LIMIT = 2**16  # bytes of a request's first line, headers and trailers
REST_TIME = 5.0  # seconds for the rest of a body whose request is answered
REST_LIMIT = 2_000_000  # bytes of it that are read and dropped
MAX_CONNECTIONS = 4000
RESERVED_FILES = 128  # file descriptors kept for other uses than connections
SPARE = 16  # connections over the limit, for health checks and `serve`
ACCEPTED_AT_ONCE = 64  # fewer than there are reserved files
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


def connection_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(MAX_CONNECTIONS, (soft - RESERVED_FILES) // 2))  # each may need one to Triton


class Connections:
    """The open connections, and those of them that wait for a request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # the longest first

    @property
    def full(self) -> bool:
        """Whether so many have requests that only health checks are answered on others."""
        return len(self._open) > self._limit

    def add(self, connection: "Connection") -> None:
        """Add one that waits; the one that has waited longest is closed if there are too many."""
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) <= self._limit:
            return
        longest = next(iter(self._waiting))
        if longest is not connection:
            self._close(longest)
        elif len(self._open) > self._limit + SPARE:
            self._close(connection)

    def begin_request(self, connection: "Connection") -> None:
        self._waiting.pop(connection, None)

    def end_request(self, connection: "Connection") -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def remove(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _close(self, connection: "Connection") -> None:
        self.remove(connection)
        connection.transport.abort()


class HeadersTooLargeError(Exception):
    """Ends the parser of a request; its client gets 431."""


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits before a request, and after its answer."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None
        self._in_request = False  # from the end of its headers to that of its answer and body
        self._message_complete = True
        self._header_size = 0  # bytes of headers that are complete
        self._unfinished = 0  # bytes since the last end of headers
        self._rest = 0  # bytes of a body after its answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer(HEADER_TIME)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._waits_for_rest:
            self._rest += len(data)
            if self._rest > REST_LIMIT:
                self.transport.abort()
                return
        super().data_received(data)
        if self._in_request or self.transport.is_closing():
            return
        self._unfinished += len(data)
        if self._unfinished > HEADER_LIMIT:
            self._refuse_headers()
        elif self._timer is None:
            self._start_timer(HEADER_TIME)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message_complete = False
        self._header_size = 0

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_request = True
        self._unfinished = 0
        self._connections.begin_request(self)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._message_complete = True
        if self.cycle.response_complete:
            self._end_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return  # or a request that came meanwhile is answered now
        if self._message_complete:
            self._end_request()
        else:
            self._rest = 0
            self._start_timer(REST_TIME)

    def send_400_response(self, msg: str) -> None:
        if self._header_size > HEADER_LIMIT:
            self._refuse_headers()
        else:
            super().send_400_response(msg)

    @property
    def _waits_for_rest(self) -> bool:
        return self._in_request and self.cycle.response_complete and not self._message_complete

    def _end_request(self) -> None:
        self._stop_timer()
        self._in_request = False
        self._connections.end_request(self)
        if self.timeout_keep_alive_task is None:  # stopped by the rest of the body
            self._start_timer(HEADER_TIME)

    def _count_header(self, size: int) -> None:
        self._header_size += size
        if self._header_size > HEADER_LIMIT:
            raise HeadersTooLargeError

    def _refuse_headers(self) -> None:
        self.transport.write(TOO_LARGE)
        self.transport.close()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._close_if_open)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_open(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.abort()
