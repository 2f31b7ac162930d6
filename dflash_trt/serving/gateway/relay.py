"""The gRPC port: bytes go on to Triton's own port as they are, and back.

One frame is added where the connection's Triton is to end: HTTP/2's GOAWAY. Requests that run go
on, and the client makes the next ones over another connection. With TLS only Triton can say it.

Triton uses a file descriptor for each connection and waits two minutes for silent ones: some
hundred of these would leave none for others.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from dflash_trt.serving.gateway.connections import HEADER_TIME, limit
from dflash_trt.serving.gateway.door import State
from dflash_trt.serving.gateway.upstream import Upstream
from dflash_trt.serving.ports import LOOPBACK

# HTTP/2 (RFC 9113, 4.1, 6.8): a frame's header is a length in 3 bytes, type, flags and a stream
FRAME_HEADER = 9
HEADERS, CONTINUATION, END_HEADERS = 1, 9, 4
# no error, and no stream is refused: those that the client has begun are answered
GOAWAY = bytes((0, 0, 8, 7, 0)) + bytes(4) + b"\x7f\xff\xff\xff" + bytes(4)


class _End(asyncio.Protocol):
    """One end of a relayed connection; what comes here goes out there."""

    transport: asyncio.Transport
    other: "_End | None" = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class _TritonEnd(_End):
    """Triton's end, which knows where a frame may be put between those that it sends."""

    def __init__(self) -> None:
        self._begun = b""  # of a frame's header
        self._left = 0  # bytes of a frame after what came so far
        self._headers_end = True  # no CONTINUATION is to come
        self._between = False
        self._last = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._last:
            return
        data, at = self._begun + data, self._left
        while at + FRAME_HEADER <= len(data):
            kind, flags = data[at + 3], data[at + 4]
            self._headers_end = kind not in (HEADERS, CONTINUATION) or bool(flags & END_HEADERS)
            at += FRAME_HEADER + int.from_bytes(data[at : at + 3])
        self._begun, self._left = data[at:], max(0, at - len(data))
        self._between = at == len(data) and self._headers_end
        assert isinstance(self.other, Relay)
        if self.other.dismissed:
            self.say_goodbye()

    def say_goodbye(self) -> None:
        """Now, or after the frame that is under way."""
        if self._between and not self._last:
            self._last = True
            assert self.other is not None
            self.other.transport.write(GOAWAY)


class Relay(_End):
    """The client's end; connected to Triton when its first bytes come, which have a time limit."""

    def __init__(self, current: Callable[[], Upstream], state: State) -> None:
        """current: where new connections go."""
        self._current = current
        self._upstream: Upstream | None = None
        self._state = state
        self.dismissed = False

    def dismiss(self) -> None:
        self.dismissed = True
        if isinstance(self.other, _TritonEnd):
            self.other.say_goodbye()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(HEADER_TIME, transport.abort)
        self._state.relays[transport] = None
        if len(self._state.relays) > limit():  # the one that has been silent for longest
            next(iter(self._state.relays)).abort()

    def data_received(self, data: bytes) -> None:
        self._timer.cancel()
        relays = self._state.relays
        relays[self.transport] = relays.pop(self.transport, None)  # at the end
        if self.other is not None:
            return super().data_received(data)
        self.transport.pause_reading()
        self._connecting = asyncio.create_task(self._connect(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._state.relays.pop(self.transport, None)
        if self._upstream is not None:
            self._upstream.leave(self)
        self._state.leave(None)
        super().connection_lost(exc)

    async def _connect(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._upstream = upstream = self._current()
        upstream.relays.add(self)
        end, loop = _End() if upstream.tls else _TritonEnd(), asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: end, LOOPBACK, upstream.grpc)
        except OSError:  # it is being started; a gRPC client tries again
            return self.transport.abort()
        end.other = self
        if self.transport.is_closing():
            return end.transport.close()
        end.transport.write(data)
        self.other = end
        with suppress(RuntimeError):  # closed meanwhile
            self.transport.resume_reading()
