"""Where a client of gRPC is told to make its next requests over another connection."""

from __future__ import annotations

import asyncio

from dflash_trt.serving.gateway.door import State
from dflash_trt.serving.gateway.relay import (
    CONTINUATION,
    END_HEADERS,
    FRAME_HEADER,
    GOAWAY,
    HEADERS,
    Relay,
    _TritonEnd,
)

DATA, SETTINGS = 0, 4


class _Client(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.got = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.got += data


def _frame(kind: int, flags: int, size: int) -> bytes:
    return size.to_bytes(3) + bytes((kind, flags)) + bytes((0, 0, 0, 1)) + bytes(size)


FRAMES = [
    _frame(SETTINGS, 0, 6),
    _frame(HEADERS, 0, 4),
    _frame(CONTINUATION, 0, 3),
    _frame(CONTINUATION, END_HEADERS, 0),
    _frame(DATA, 0, 20),
    _frame(HEADERS, END_HEADERS, 2),
    _frame(DATA, 0, 300),
]
SENT = b"".join(FRAMES)


def _no_upstream() -> None:
    raise AssertionError


def _frames(sent: bytes) -> list[bytes]:
    frames, at = list[bytes](), 0
    while at < len(sent):
        size = FRAME_HEADER + int.from_bytes(sent[at : at + 3])
        frames.append(sent[at : at + size])
        at += size
    return frames


def test_goodbye_is_between_frames() -> None:
    """Triton's bytes come in two pieces, wherever they are cut; then the client is to be told."""
    for cut in range(len(SENT) + 1):
        client, end = _Client(), _TritonEnd()
        relay = Relay(_no_upstream, State())  # type: ignore[arg-type]
        relay.transport, relay.other, end.other = client, end, relay
        for piece in filter(None, (SENT[:cut], SENT[cut:])):
            end.data_received(piece)
            relay.dismiss()
        frames = _frames(client.got)
        assert frames.count(GOAWAY) == 1
        assert frames.index(GOAWAY) not in (0, 2, 3)  # before settings, or within headers
        assert [each for each in frames if each != GOAWAY] == FRAMES
