"""The gRPC port: bytes go on to Triton's own port as they are, and back.

Triton uses a file descriptor for each connection and waits two minutes for silent ones: some
hundred of these would leave none for others.
"""

import asyncio
from contextlib import suppress

from dflash_trt.serving.gateway.connections import HEADER_TIME, limit
from dflash_trt.serving.gateway.door import State
from dflash_trt.serving.ports import LOOPBACK


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


class Relay(_End):
    """The client's end; connected to Triton when its first bytes come, which have a time limit."""

    def __init__(self, port: int, state: State) -> None:
        """port: Triton's own."""
        self._port = port
        self._state = state

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
        self._state.leave(None)
        super().connection_lost(exc)

    async def _connect(self, data: bytes) -> None:
        end, loop = _End(), asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: end, LOOPBACK, self._port)
        except OSError:  # it is being started; a gRPC client tries again
            return self.transport.abort()
        end.other = self
        if self.transport.is_closing():
            return end.transport.close()
        end.transport.write(data)
        self.other = end
        with suppress(RuntimeError):  # closed meanwhile
            self.transport.resume_reading()
