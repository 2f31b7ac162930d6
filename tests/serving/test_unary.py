"""Plain infer as a small gRPC client of `dflash`, over a stand-in for that model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import grpc
import numpy as np
import pytest
import stand_in
from stand_in import Answer, StandIn, aborted, failure, hanging, part, parts

from dflash_trt.serving.front.unary import UnaryClient
from dflash_trt.serving.internal import GRPC

WAIT = 10.0


@contextmanager
def asked(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, cancelled: bool = False
) -> Iterator[tuple[StandIn, Any]]:
    answers = Queue[Any]()
    inputs = {"text_input": np.array([b"a"], object), "n": np.array([1], np.int32)}
    with stand_in.stand_in(answer) as server:

        def gone() -> bool:  # once the model has the request
            return cancelled and bool(server.metadata)

        how = {"address": server.address, "headers": {"x-key": "secret"}, "tls": None}
        monkeypatch.setenv(GRPC, json.dumps(how))
        parameters = {"client": "alice", "client-key": "k", "x-request-id": "r1"}
        UnaryClient().ask(inputs, parameters, 1.5, gone, answers.put)
        yield server, answers.get(timeout=WAIT)


def test_a_request_and_its_answer_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with asked(monkeypatch, parts(part(text_output=["é"], token_ids=[5, 6]))) as (server, found):
        assert found["text_output"].tolist() == ["é".encode()]
        assert found["token_ids"].tolist() == [5, 6]
        assert server.requests == [{"text_input": "a", "n": 1}]
        assert server.timeouts == [pytest.approx(1.5)]
        assert ("x-key", "secret") in server.metadata[0].items()


def test_an_error_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with asked(monkeypatch, failure("INVALID_ARG", "top_k is 5: no.")) as (_, found):
        assert found == ("INVALID_ARG", "top_k is 5: no.")


def test_who_goes_away_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    with asked(monkeypatch, hanging(), cancelled=True) as (server, found):
        assert found[0] == "CANCELLED"
        assert server.ended.acquire(timeout=WAIT), "the call goes on"


def test_a_model_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (aborted(grpc.StatusCode.UNAVAILABLE), parts()):
        with asked(monkeypatch, answer) as (_, found):
            assert found[0] == "UNAVAILABLE"
