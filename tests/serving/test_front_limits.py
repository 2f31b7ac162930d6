"""No request holds up another client's, and none stays unanswered, whatever fails."""

import threading
import time
from typing import Any

import pytest

from dflash_trt.decoding import Grammar, Grammars, SequenceState
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.serving.model import request_handler as module
from dflash_trt.serving.model.request_handler import RequestHandler
from dflash_trt.serving.model.response_sender import ResponseSender
from dflash_trt.serving.refusals import CLIENT_LIMIT, refusal_status, retry_after
from tests.support.handlers import VOCAB, WAIT, CountingModel, ask, open_front
from tests.support.request_tools import wait_until


class PanicException(BaseException):
    """The exception that pyo3 raises when Rust panics."""


def test_a_full_queue_refuses_and_takes_again(model: CountingModel) -> None:
    with open_front(model, slots=1, max_queue=3) as front:
        model.pause.clear()
        held = [ask(front, max_tokens=1, client="a") for _ in range(4)]
        wait_until(lambda: len(front._queue) == 3)
        for client in ("a", "b"):
            assert ask(front, client=client).next() == (
                "UNAVAILABLE",
                "The request queue is full. Try again later.",
            )
        model.pause.set()
        for reply in held:
            assert reply.next()[0].finish_reason == ["length"]
        wait_until(lambda: front._admitted.total() == 0)  # all were released


def test_a_limit_of_one_client(model: CountingModel) -> None:
    with open_front(model, slots=1, max_queue=9, max_per_client=2) as front:
        model.pause.clear()
        held = [ask(front, max_tokens=1, client="a") for _ in range(2)]
        code, message = ask(front, client="a").next()
        assert (code, message) == ("UNAVAILABLE", f"2 {CLIENT_LIMIT}. Try again later.")
        code, message = ask(front, client="b", n=3).next()
        assert (code, message) == ("INVALID_ARG", "n is 3. Ask for 1 to 2 choices.")
        held.append(ask(front, max_tokens=1, client="b"))
        model.pause.set()
        for reply in held:
            assert reply.next()[0].finish_reason == ["length"]


def test_a_refusal_says_when_to_ask_again(
    model: CountingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three places, and one sequence ends in 2 s: 6 s. Ends of an hour ago tell nothing."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with open_front(model, slots=3, max_queue=0) as front:
        model.pause.clear()
        held = [ask(front, max_tokens=1) for _ in range(3)]
        front._ends.extend([now - 4, now - 2, now])
        _, message = ask(front).next()
        assert message == "The request queue is full. Try again in 6 s."
        assert (retry_after(message), refusal_status(message)) == (6, 503)
        front._ends.extend([now - 3602, now - 3601, now - 3600])
        assert ask(front).next()[1] == "The request queue is full. Try again later."
        model.pause.set()
        for reply in held:
            assert reply.next()[0].finish_reason == ["length"]


def test_one_slot_is_enough_to_say_when_and_refusals_tell_nothing(
    model: CountingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with open_front(model, slots=1, max_queue=0) as front:
        for _ in range(2):
            assert ask(front, max_tokens=1).next()[0].finish_reason == ["length"]
            now += 7
        for _ in range(5):  # read, and then refused
            assert ask(front, max_tokens=1000).next()[0] == "INVALID_ARG"
        model.pause.clear()
        held = ask(front, max_tokens=1)
        assert ask(front).next()[1] == "The request queue is full. Try again in 7 s."
        model.pause.set()
        assert held.next()[0].finish_reason == ["length"]


def test_a_grammar_that_takes_long_holds_no_other_request_up(
    front: RequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    compile_ = Grammars._compile

    def slowly(grammars: Grammars, grammar: Grammar) -> Matcher:
        assert go_on.wait(WAIT)
        return compile_(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    waits = ask(front, max_tokens=1, guided_regex="w7")
    assert ask(front, max_tokens=1).next()[0].token_ids == [2]
    assert waits.got.empty()
    go_on.set()
    assert waits.next()[0] == "INVALID_ARG"  # this tokenizer knows no grammars


def test_an_error_keeps_its_code_however_fast_the_sender_is(
    front: RequestHandler, model: CountingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that said "error" was once sent as an answer when it came before the error."""
    post = ResponseSender.put

    def slowly(*given: Any, **named: Any) -> None:
        post(*given, **named)
        time.sleep(0.1)

    monkeypatch.setattr(ResponseSender, "put", slowly)
    for stream in (False, True):
        model.error = RuntimeError("a round failed")
        reply = ask(front, max_tokens=9, stream=stream)
        got = reply.next()
        while not isinstance(got[0], str):
            assert not got[1]
            got = reply.next()
        assert got[0] == "INTERNAL"


@pytest.mark.parametrize("error", [ValueError, PanicException])
@pytest.mark.parametrize("stop_words", [[], ["never"]])
def test_a_text_that_cannot_be_given_out_ends_alone(
    front: RequestHandler,
    model: CountingModel,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    stop_words: list[str],
) -> None:
    class Broken:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def decode(self, tokens: list[int], **options: Any) -> str:
            if 42 in tokens:
                raise error("broken")
            return self.tokenizer.decode(tokens, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tokenizer, name)

    words = {"stop_words": stop_words} if stop_words else {}
    front._tokenizer = Broken(front._tokenizer)  # type: ignore[assignment]
    model.pause.clear()
    good = ask(front, "w60", max_tokens=30, ignore_eos=True, **words)
    bad = ask(front, "w30", max_tokens=30, ignore_eos=True, **words)
    model.pause.set()
    assert bad.next() == ("INTERNAL", module.NO_TEXT)
    assert good.next()[0].token_ids == [(61 + i) % VOCAB for i in range(30)]
    assert ask(front, max_tokens=1).next()[0].token_ids == [2]  # its row is free


def test_who_ended_in_a_step_that_failed_is_answered(
    model: CountingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = SequenceState.commit

    def fail(self: SequenceState, tokens: Any) -> int:
        if self.request.prompt[0] == 5 and self.tokens:
            raise ValueError
        return commit(self, tokens)

    monkeypatch.setattr(SequenceState, "commit", fail)
    with open_front(model) as front:
        model.pause.clear()
        # the second round is the first of both: one ends in it, the other fails
        replies = [ask(front, "w1", max_tokens=9), ask(front, "w5", max_tokens=9)]
        wait_until(lambda: len(front._queue) == 1)
        model.pause.set()
        answers = [reply.next() for reply in replies]
    assert answers[0][0].token_ids == list(range(2, 11))
    assert answers[1][0] == "INTERNAL"


def test_a_request_dropped_before_it_is_in_the_line_never_runs(
    front: RequestHandler, model: CountingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = ResponseSender.open

    def open_and_drop(self: ResponseSender, stream: Any) -> bool:
        result = opened(self, stream)
        front._drop(stream)  # as for a client that has gone
        return result

    model.pause.clear()
    running = [ask(front, f"w{i}", max_tokens=1) for i in (1, 2)]
    wait_until(lambda: len(front._queue) == 1 and bool(model.prompts))
    monkeypatch.setattr(ResponseSender, "open", open_and_drop)
    dropped = ask(front, "w9", max_tokens=1)
    part, last = dropped.next()
    assert (part.finish_reason, last) == (["cancelled"], True)
    model.pause.set()
    for reply in running:
        assert reply.next()[0].finish_reason == ["length"]
    assert 9 not in model.prompts


def test_a_tokenizer_that_panics_is_an_error(
    front: RequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: Any, **__: Any) -> Any:
        raise PanicException("index out of bounds")

    class Panics:
        encode_batch_fast = panic

        def __init__(self, tokenizer: Any) -> None:
            self.get_vocab = tokenizer.get_vocab

    tokenizer = front._tokenizer
    front._tokenizer = Panics(tokenizer)  # type: ignore[assignment]
    assert ask(front, max_tokens=1).next()[0] == "INTERNAL"
    front._tokenizer = tokenizer
    assert ask(front, max_tokens=1).next()[0].token_ids == [2]
