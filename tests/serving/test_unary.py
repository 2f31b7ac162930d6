"""Plain infer's way to the request handler, over a stand-in that notes what is submitted."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from dflash_trt.errors import EngineError
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.channel import RUNTIME, HandlerStatus, load_drafter, send_command
from dflash_trt.serving.model.unary import infer, start_listener
from tests.support.request_tools import wait_until

CHUNK = Chunk(
    "é",
    finish_reason="stop",
    token_ids=[5, 6],
    token_sources=["target", "drafter"],
    round_tokens=[1, 1],
    prompt_tokens=1,
    completion_tokens=2,
    rounds=1,
    drafted=1,
    accepted=1,
    acceptance_length=2.0,
    time_to_first_token=0.1,
)
BROKEN = -1  # choices that the stand-in fails at
WAIT = 10.0
Submitted = Queue[tuple[Any, ...]]


class StandIn:
    """A request handler."""

    def __init__(self, submitted: Submitted) -> None:
        self._submitted = submitted

    def control(self, _: object) -> HandlerStatus:
        return HandlerStatus(1, 2)

    def submit(self, inputs: Any, *rest: Any) -> None:
        if inputs["n"] == BROKEN:
            raise TypeError
        self._submitted.put((inputs, *rest))

    def load_drafter(self, engine: Path) -> None:
        if not engine.exists():
            raise EngineError(f"{engine} is not there", "Give another")
        self._submitted.get(timeout=WAIT)  # it takes as long


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submitted]:
    monkeypatch.setenv(RUNTIME, str(tmp_path))
    submitted = Submitted()

    server = start_listener(StandIn(submitted))
    yield submitted
    server.close()


def asked(n: int = 1, cancelled: threading.Event | None = None) -> Queue[Any]:
    answers, gone = Queue[Any](), cancelled or threading.Event()
    inputs = {"text_input": np.array([b"a"], object), "n": np.array([n], np.int32)}
    threading.Thread(
        target=lambda: answers.put(infer(inputs, 1.5, "alice", "r1", gone.is_set)), daemon=True
    ).start()
    return answers


def test_a_request_and_its_answer_go_through(submitted: Submitted) -> None:
    answers = asked()
    inputs, reply, *rest = submitted.get(timeout=WAIT)
    assert {name: array.tolist() for name, array in inputs.items()} == {
        "text_input": [b"a"],
        "n": [1],
    }
    assert rest == [1.5, "alice", "r1"]
    assert not reply.cancelled()
    reply.send([CHUNK], last=True)
    found = answers.get(timeout=WAIT)
    assert found["text_output"].tolist() == ["é".encode()]
    assert found["token_ids"].tolist() == [5, 6]


def test_an_error_keeps_its_code(submitted: Submitted) -> None:
    answers = asked()
    submitted.get(timeout=WAIT)[1].fail("INVALID_ARG", "top_k is 5: no.")
    assert answers.get(timeout=WAIT) == ("INVALID_ARG", "top_k is 5: no.")


def test_who_goes_away_cancels(submitted: Submitted) -> None:
    gone = threading.Event()
    answers = asked(cancelled=gone)
    reply = submitted.get(timeout=WAIT)[1]
    gone.set()
    assert answers.get(timeout=WAIT)[0] == "CANCELLED"
    wait_until(reply.cancelled)
    reply.send([CHUNK], last=True)  # an answer that was on its way fails nothing


def test_a_request_that_fails_at_once_ends_no_other(submitted: Submitted) -> None:
    assert asked(BROKEN).get(timeout=WAIT)[0] == "INTERNAL"
    asked()
    submitted.get(timeout=WAIT)


def test_commands_come_the_same_way(submitted: Submitted, tmp_path: Path) -> None:
    assert send_command(tmp_path, "status") == HandlerStatus(1, 2)
    assert submitted.empty()


def test_a_drafter_that_loads_holds_up_nobody(submitted: Submitted, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        refusal = pool.submit(load_drafter, tmp_path, tmp_path, WAIT)
        for _ in range(3):
            assert send_command(tmp_path, "status") == HandlerStatus(1, 2)
        assert not refusal.done()
        asked()
        assert refusal.result(WAIT) == ""


def test_a_drafter_that_does_not_load_says_why(submitted: Submitted, tmp_path: Path) -> None:
    assert "nowhere is not there" in load_drafter(tmp_path, Path("nowhere"), WAIT)


def test_a_model_that_is_not_there_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME, str(tmp_path))
    assert asked().get(timeout=WAIT)[0] == "UNAVAILABLE"
