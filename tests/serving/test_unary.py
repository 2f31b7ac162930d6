"""The way of plain infer into the front, within one process."""

from __future__ import annotations

import _thread
import resource
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from dflash_trt.serving.front.request_handler import RequestHandler
from dflash_trt.serving.front.unary import UnaryCall, UnaryServer
from dflash_trt.serving.internal import RUNTIME

WAIT = 10.0
FILES = 1100  # more than `select` takes


class Asked:
    """Stands in for the request handler: keeps what it is asked (`RequestHandler.submit`)."""

    def __init__(self) -> None:
        self.queue: Queue[tuple[Any, ...]] = Queue()

    def submit(self, *asked: Any) -> None:
        self.queue.put(asked)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME, str(tmp_path))


@contextmanager
def _door() -> Iterator[Asked]:
    asked = Asked()
    handler: RequestHandler = asked  # type: ignore[assignment]
    with closing(UnaryServer(handler)):
        yield asked


def _call() -> UnaryCall:
    inputs = {"text_input": np.array([b"\xff"], object), "n": np.array([2], np.int32)}
    return UnaryCall(inputs, 1.5, "alice", "r1", {"traceparent": "t1"})


def test_a_request_and_its_error_go_through() -> None:
    with _door() as asked, closing(_call()) as call:
        inputs, reply, timeout, *who, context = asked.queue.get(timeout=WAIT)
        assert context == {"traceparent": "t1"}
        assert inputs["text_input"].tolist() == [b"\xff"]
        assert (inputs["n"].tolist(), timeout, who) == ([2], 1.5, ["alice", "r1"])
        assert not call.wait(0.01)
        assert not reply.cancelled()
        reply.fail("UNAVAILABLE", "é")
        assert call.wait(WAIT)
        assert call.answer() == ("UNAVAILABLE", "é")


def test_who_goes_away_has_cancelled() -> None:
    with _door() as asked:
        call = _call()
        _, reply, *_ = asked.queue.get(timeout=WAIT)
        call.close()
        assert reply.cancelled()


def test_without_a_thread_it_is_refused_and_the_next_one_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _door() as asked:
        with monkeypatch.context() as patch:

            def no_thread(*_: Any) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(_thread, "start_new_thread", no_thread)
            with closing(_call()) as call:
                assert call.wait(WAIT)
                with pytest.raises(ConnectionResetError):
                    call.answer()
        with closing(_call()):
            assert asked.queue.get(timeout=WAIT)


def test_without_a_front_it_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        _call()
    with _door():
        pass
    with pytest.raises(FileNotFoundError):
        _call()


def test_any_number_may_wait() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * FILES:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * FILES, hard))
    files = [socket.socket() for _ in range(FILES)]
    try:
        test_a_request_and_its_error_go_through()
        test_who_goes_away_has_cancelled()
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
