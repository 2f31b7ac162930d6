"""Unix sockets between processes of one server: times of their own, and who is at the other end."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from dflash_trt.serving.channel import (
    RUNTIME,
    HandlerStatus,
    SocketServer,
    ask,
    json_server,
    receive,
    send_command,
    socket_path,
)
from dflash_trt.serving.model import unary

MARGIN = 5.0  # seconds that a busy machine may add


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SocketServer]:
    """Listen at the socket of `dflash`."""
    monkeypatch.setenv(RUNTIME, str(tmp_path))
    monkeypatch.setattr(unary, "TIMEOUT", 0.2)
    server = unary.start_listener(Mock(control=lambda command: HandlerStatus(1, 2)))
    yield server
    server.close()


@pytest.mark.parametrize("begun", [b"", b'{"inputs": '], ids=["nothing", "half a request"])
def test_who_sends_no_message_holds_up_nobody_for_long(
    model: SocketServer, tmp_path: Path, begun: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(socket_path()))
        silent.sendall(begun)
        silent.settimeout(MARGIN)
        assert send_command(tmp_path, "status") == HandlerStatus(1, 2)
        assert silent.recv(1) == b""  # it was closed


@pytest.mark.parametrize(
    "line",
    [
        *(b"5", b"null", b"[]", b'"command"', b'{"command": []}', b'{"command": {}}', b"{}"),
        *(b'"drafter"', b'{"drafter": 5}'),
        *(b'{"inputs": 5}', b'{"inputs": {"a": 5}, "timeout": 1}', b"[" * 9999),
        *(b"\xff", b"NaN", b"no JSON"),
    ],
    ids=lambda line: line[:20].decode(errors="replace"),
)
def test_whatever_one_sends_the_next_is_served(
    model: SocketServer, tmp_path: Path, line: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(socket_path()))
        stranger.sendall(line + b"\n")
        stranger.settimeout(MARGIN)
        while stranger.recv(9999):
            pass
    assert send_command(tmp_path, "status") == HandlerStatus(1, 2)


def test_whatever_an_updater_sends_the_next_is_served(tmp_path: Path) -> None:
    address = str(tmp_path / "socket")
    server = json_server(address, lambda message: message["build"])
    try:
        with pytest.raises(ValueError, match="ended before"):
            ask(address, 5, MARGIN)
        assert ask(address, {"build": "a"}, MARGIN) == "a"
    finally:
        server.close()


def test_a_message_has_a_time_for_all_of_it() -> None:
    """A byte now and then does not begin it again."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def send_slowly() -> None:
        for _ in range(int(MARGIN / 0.02)):
            theirs.sendall(b" ")
            if ended.wait(0.02):
                return
        theirs.close()

    sender = threading.Thread(target=send_slowly)
    with ours, theirs:
        sender.start()
        with pytest.raises(TimeoutError):
            receive(ours, 0.2)
        ended.set()
        sender.join()


def test_another_user_gets_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder of the sockets was set by hand to one of others."""
    received = list[str]()
    address = str(tmp_path / "socket")
    server = json_server(address, lambda message: received.append(message))
    try:
        assert ask(address, "ours", MARGIN) is None
        stranger = struct.pack("3i", 1, os.geteuid() + 1, 1)
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "getsockopt", lambda *_: stranger, raising=False)
            with pytest.raises(ConnectionError, match="another user"):
                ask(address, "a secret", MARGIN)
        assert received == ["ours"]
    finally:
        server.close()
