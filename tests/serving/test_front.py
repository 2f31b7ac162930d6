"""The front model's thread, without Triton: failures, cancellation and admission."""

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.config.build import Speculation
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.model.engine_loop import EngineGoneError
from dflash_trt.serving.model.request_handler import RequestHandler
from dflash_trt.serving.model.requests import parse_request
from dflash_trt.speculation import CostProfile
from tests.support.handlers import (
    BROKEN,
    VOCAB,
    WAIT,
    CountingModel,
    FakeReply,
    Response,
    ask,
    open_front,
    submit,
)
from tests.support.request_tools import wait_until
from tests.support.triton_metrics import Triton


def test_one_response_unless_a_stream_is_asked_for(front: RequestHandler) -> None:
    part, last = ask(front, max_tokens=10).next()
    assert last
    assert part.token_ids == list(range(2, 12))
    assert (part.prompt_tokens, part.completion_tokens, part.rounds) == (1, [10], [3])
    assert part.finish_reason == ["length"]
    assert part.acceptance_length == [3.0]


def _stream(reply: FakeReply) -> list[Response]:
    parts = []
    while True:
        part, last = reply.next()
        parts.append(part)
        if last:
            return parts


def test_end_of_text_ends_it_unless_ignored(front: RequestHandler) -> None:
    part, _ = ask(front, "w45", max_tokens=20).next()
    assert part.finish_reason == ["stop"]
    assert part.token_ids == [46, 47, 48, 49, 50]
    part, _ = ask(front, "w45", max_tokens=20, ignore_eos=True).next()
    assert part.finish_reason == ["length"]
    assert len(part.token_ids) == 20


def test_max_tokens_defaults_to_128_or_what_fits(front: RequestHandler) -> None:
    assert ask(front, ignore_eos=True).next()[0].completion_tokens == [128]
    assert ask(front, " ".join(["w1"] * 390), ignore_eos=True).next()[0].completion_tokens == [10]


@pytest.mark.parametrize("scored", [{}, {"logprobs": 2}])  # Triton was reported to crash
def test_a_cancelled_request_stops(
    scored: dict[str, int], front: RequestHandler, model: CountingModel
) -> None:
    model.pause.clear()
    reply = ask(front, max_tokens=300, stream=True, ignore_eos=True, **scored)
    reply.gone.set()
    part = reply.next()[0]  # although a round may be waiting
    if part != "CANCELLED":
        assert (part.finish_reason, part.token_ids) == (["cancelled"], [])
        assert reply.next()[0] == "CANCELLED"
    model.pause.set()  # that round may still run, and no other
    assert ask(front, max_tokens=4).next()[0].token_ids == [2, 3, 4, 5]
    assert model.rounds <= 1 + 2  # the two of the new request: its prompt's and one of four tokens


class _AsksAgain(FakeReply):
    """A client that sends its next request before the front goes on."""

    def __init__(self, front: RequestHandler) -> None:
        super().__init__()
        self._front = front

    def send(self, chunks: Sequence[Chunk], *, last: bool) -> None:
        super().send(chunks, last=last)
        if last:
            self.got.put((ask(self._front, max_tokens=1),))


@pytest.mark.parametrize("stream", [False, True])
def test_a_place_is_free_as_soon_as_its_client_is_answered(
    model: CountingModel, stream: bool
) -> None:
    with open_front(model, slots=1, max_queue=0) as front:
        reply = _AsksAgain(front)
        submit(front, reply, max_tokens=1, stream=stream)
        assert reply.next()[0].token_ids == [2]
        (again,) = reply.next()
        assert again.next()[0].token_ids == [2]


@pytest.mark.parametrize(
    ("text", "values", "words"),
    [
        (b"", {}, "empty"),
        (b"\xff\xfe", {}, "UTF-8"),
        (b"w1", {"max_tokens": 0}, "max_tokens is 0"),
        (b"w1", {"max_tokens": 400}, "exceed"),
        (b"w1", {"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        (b"w1", {"messages": b'[{"role": "u"}]'}, "both given"),
        (b"", {"messages": b'[{"role": "user", "content": 1}]'}, "neither text nor a list"),
        (
            b"",
            {"messages": b'[{"role": "u"}]', "tools": b"1"},
            "tools is 1 and must be a valid list",
        ),
        (b"w1 " * 10_000, {}, "maximum context length is 400 tokens"),
        (b"w1 " * 100_000, {}, "are 300000 bytes"),
        (b"", {"messages": b" " * 100_000}, "are 100000 bytes"),
        (b"w1", {"bad_words": b"w" * 20_000}, "bad_words[0] must have at most 256 characters"),
        (b"w1", {"n": 4}, "n is 4. Ask for 1 to 3"),
        (b"w1", {"input_ids": 1}, "text_input and input_ids are both given"),
        (b"", {"input_ids": 10**6}, "input_ids holds 1000000, no token"),
        (b"", {"input_ids": -1}, "input_ids holds -1, no token"),
        (b"", {"input_ids": [1] * 401}, "maximum context length is 400"),
        (b"w1", {"stop_token_ids": -1}, "stop_token_ids holds -1, no token"),
    ],
)
def test_a_bad_request_is_refused(
    front: RequestHandler, text: bytes, values: dict, words: str
) -> None:
    inputs = {
        name: np.array([value], object if isinstance(value, bytes) else None)
        for name, value in values.items()
    }
    reply = FakeReply()
    front.submit({"text_input": np.array([text], dtype=object), **inputs}, reply)
    code, message = reply.next()
    assert code == "INVALID_ARG"
    assert words in message
    assert "\n" not in message
    assert ask(front, max_tokens=1).next()[0].token_ids == [2]


def test_an_engine_that_is_gone_can_be_retried(front: RequestHandler, model: CountingModel) -> None:
    model.error = EngineGoneError("Stub process 'verify' is not healthy")
    assert ask(front).next()[0] == "UNAVAILABLE"
    assert ask(front, max_tokens=1).next()[0].token_ids == [2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("words", "values", "text", "tokens"),
    [
        (["w7 w8"], {}, "w2 w3 w4 w5 w6 ", 7),  # over the border of two rounds
        (["x", "w4", "w3 w4"], {}, "w2 ", 3),  # both are complete with w4
        (["w9"], {"max_tokens": 3}, "w2 w3 w4", 3),
        (["w4 z"], {"max_tokens": 3}, "w2 w3 w4", 3),  # held back, then given out
        (["w5"], {"min_tokens": 5, "max_tokens": 6}, "w2 w3 w4 w5 w6 w7", 6),
        (["w2"], {"exclude_input_in_output": False}, "w1", 1),
    ],
)
def test_stop_words(
    front: RequestHandler, words: list[str], values: dict, text: str, tokens: int, stream: bool
) -> None:
    parts = _stream(ask(front, stop_words=words, stream=stream, ignore_eos=True, **values))
    assert "".join(part.text_output[0] for part in parts) == text
    assert [t for part in parts for t in part.token_ids] == list(range(2, 2 + tokens))
    assert parts[-1].finish_reason == ["length" if tokens == values.get("max_tokens") else "stop"]
    assert sum(t for part in parts for t in part.round_tokens) == tokens - 1
    assert parts[-1].accepted[0] <= tokens - 1


def test_each_drafted_text_has_its_acceptance(model: CountingModel) -> None:
    triton = Triton()
    with open_front(model, triton=triton) as front:
        ask(front, max_tokens=10).next()  # 3 rounds for 9 tokens
        ask(front, max_tokens=1).next()  # no round
        ask(front, max_tokens=10, drafting=False).next()
    assert triton.value("dflash_request_acceptance_length_sum") == 3.0


def _replaced_beside_a_text(
    front: RequestHandler, model: CountingModel, drafter: str
) -> tuple[Response, BaseException | None]:
    """Replace the drafter while a text of 100 tokens runs, which takes 25 rounds with drafts."""
    model.seconds = 0.01
    reply = ask(front, max_tokens=100, ignore_eos=True)
    wait_until(lambda: model.rounds > 2)
    with ThreadPoolExecutor() as pool:
        error = pool.submit(front.load_drafter, Path(drafter)).exception(WAIT)
    model.seconds = 0.0
    return reply.next()[0], error


def test_a_new_drafter_takes_the_texts_that_begin(
    front: RequestHandler, model: CountingModel
) -> None:
    part, error = _replaced_beside_a_text(front, model, "new")
    assert (error, model.drafter) == (None, Path("new"))
    assert part.token_ids == [token % VOCAB for token in range(2, 102)]
    assert part.rounds[0] > 50  # it went on without drafts
    assert ask(front, max_tokens=10).next()[0].rounds == [3]


def test_a_drafter_that_does_not_load_costs_no_text_its_drafts(
    front: RequestHandler, model: CountingModel
) -> None:
    part, error = _replaced_beside_a_text(front, model, "broken")
    assert (error, model.drafter) == (BROKEN, Path("drafter"))
    assert part.rounds == [25]


def test_a_new_drafter_does_not_meet_the_old_ones_cache(model: CountingModel) -> None:
    prompt = " ".join(f"w{number}" for number in range(40))
    with open_front(model, prefix_cache=1) as front:
        ask(front, prompt, max_tokens=1).next()
        assert ask(front, prompt, max_tokens=1).next()[0].cached_tokens == [32]
        front.load_drafter(Path("new"))
        cached = [ask(front, prompt, max_tokens=1).next()[0].cached_tokens for _ in range(2)]
        assert cached == [[0], [32]]  # the cache is empty, and filled again


def test_a_deadline_ends_a_text_as_it_is(front: RequestHandler, model: CountingModel) -> None:
    model.seconds = 0.05
    running = [ask(front, timeout=0.3, max_tokens=300, ignore_eos=True) for _ in range(2)]
    waiting = ask(front, timeout=0.15, max_tokens=300, ignore_eos=True)
    for reply in running:
        part, last = reply.next()
        assert last
        assert part.finish_reason == ["cancelled"]
        assert 0 < part.completion_tokens[0] < 300
        assert part.token_ids == [(2 + i) % VOCAB for i in range(part.completion_tokens[0])]
    part, last = waiting.next()
    assert last
    assert (part.finish_reason, part.completion_tokens) == (["cancelled"], [0])
    assert ask(front, max_tokens=1).next()[0].token_ids == [2]


def test_a_lower_priority_number_is_served_first(model: CountingModel) -> None:
    with open_front(model, slots=1, max_queue=10) as front:
        model.pause.clear()
        asked = [("w1", 0), ("w10", 5), ("w20", 5), ("w30", -1), ("w40", 9)]
        replies = []
        for text, priority in asked:
            replies.append(ask(front, text, max_tokens=2, priority=priority))
            while not model.prompts:  # the first of them finds the row free
                time.sleep(0.01)
        wait_until(lambda: len(front._queue) == 4)
        model.pause.set()
        for reply, (text, _) in zip(replies, asked, strict=True):
            assert reply.next()[0].token_ids[0] == int(text[1:]) + 1
    assert model.prompts == [1, 30, 10, 20, 40]


def test_messages_go_through_the_template(front: RequestHandler) -> None:
    messages = json.dumps([{"role": "user", "content": "w1 w2"}, {"role": "x", "content": "w3"}])

    def ids(**values: Any) -> tuple[int, list[int]]:
        part, _ = ask(front, None, messages=messages, max_tokens=2, **values).next()
        return part.prompt_tokens, part.token_ids

    assert ids() == (4, [10, 11])
    assert ids(add_generation_prompt=False) == (4, [9, 10])
    assert ids(chat_template_kwargs='{"word": "w20 w21"}') == (5, [22, 23])
    # the messages are not to be replaced
    reply = ask(front, None, messages=messages, chat_template_kwargs='{"messages": []}')
    assert "must not hold messages" in reply.next()[1]


def test_costs_are_measured_when_the_models_are_loaded(
    model: CountingModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without costs the policy is fixed: the whole block but the anchor."""
    answers = [EngineGoneError("not ready"), EngineGoneError("not ready"), ValueError("no time")]

    def measure(*_: object) -> CostProfile:
        raise answers.pop(0)

    monkeypatch.setattr("dflash_trt.serving.model.engine_loop.measure", measure)
    with open_front(model, speculation=Speculation(), slots=12) as front:
        part, _ = ask(front, max_tokens=10).next()
        assert (part.token_ids, part.rounds) == (list(range(2, 12)), [3])
    assert answers == []
    assert "steps cannot be measured" in caplog.text


def test_closing_while_models_are_being_loaded(
    model: CountingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> CostProfile:
        raise EngineGoneError("not ready")

    monkeypatch.setattr("dflash_trt.serving.model.engine_loop.measure", measure)
    before = threading.active_count()
    with open_front(model, speculation=Speculation(), slots=12) as front:
        reply = ask(front, max_tokens=10)
    assert reply.next()[0] == "UNAVAILABLE"
    assert threading.active_count() == before
    assert model.rounds == 0


def test_closing_answers_what_is_open(front: RequestHandler, model: CountingModel) -> None:
    model.pause.clear()
    reply = ask(front, max_tokens=300, ignore_eos=True)
    closer = threading.Thread(target=front.close)
    closer.start()
    model.pause.set()
    assert reply.next()[0] == "UNAVAILABLE"
    closer.join(WAIT)
    assert not closer.is_alive()


def test_a_request_that_is_read_while_the_front_closes_is_answered(
    front: RequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_close(*given: Any) -> Any:
        closer = threading.Thread(target=front.close)
        closer.start()
        closer.join(0.5)  # it waits for the reader, which is here
        return parse_request(*given)

    monkeypatch.setattr("dflash_trt.serving.model.request_handler.parse_request", read_and_close)
    assert ask(front).next()[0] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, (0.7, 20, 1.1, 30)),
        ({"temperature": 0.0, "top_k": 0}, (0.0, 0, 1.1, 30)),
        ({"max_tokens": 50, "repetition_penalty": 1.0}, (0.7, 20, 1.0, 50)),
        ({"text_input": b" ".join([b"w1"] * 390)}, (0.7, 20, 1.1, 10)),  # as much as there is room
    ],
)
def test_what_a_request_does_not_say_is_the_models_default(
    sent: dict[str, Any], expected: tuple[float, ...], model: CountingModel
) -> None:
    defaults = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 30}
    types = {float: np.float32, int: np.int32, bytes: np.object_}
    tensors = {
        name: np.array([value], types[type(value)])
        for name, value in {"text_input": b"w1", **sent}.items()
    }
    with open_front(model, sampling=defaults) as front:
        [request] = parse_request(
            tensors, front._tokenizer, front._chat_model, front._settings
        ).choices
    sampling = request.sampling
    found = (sampling.temperature, sampling.top_k, sampling.repetition_penalty, request.max_tokens)
    assert found == pytest.approx(expected)
