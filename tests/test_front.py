"""The front model's thread, without Triton: failures, cancellation and admission."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from triton_metrics import Triton

from dflash_trt.decoding.rounds import RoundOutput, VerifyInput, no_candidates
from dflash_trt.serving.front import Front
from dflash_trt.serving.metrics import Metrics
from dflash_trt.serving.parts import Part
from dflash_trt.serving.settings import Settings

WAIT = 10.0
VOCAB = 100


class FakeReply:
    """Keeps what the front sends."""

    def __init__(self) -> None:
        self.got: queue.Queue[tuple] = queue.Queue()
        self.gone = threading.Event()

    def send(self, part: Part, *, last: bool) -> None:
        self.got.put((part, last))

    def fail(self, code: str, message: str) -> None:
        self.got.put((code, message))

    def cancelled(self) -> bool:
        return self.gone.is_set()

    def next(self) -> tuple:
        return self.got.get(timeout=WAIT)


class CountingModel:
    """A target that counts up by one, a drafter that is always right; `pause` holds a round."""

    def __init__(self) -> None:
        self.pause = threading.Event()
        self.pause.set()
        self.error: Exception | None = None
        self.rounds = 0
        self.seconds = 0.0  # of a round

    def __call__(self, x: VerifyInput) -> RoundOutput:
        assert self.pause.wait(WAIT)
        self.rounds += 1
        time.sleep(self.seconds)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        lengths, forced, _, _ = x.rows.T
        last = (x.tokens[np.arange(len(lengths)), lengths - 1] + 1) % VOCAB
        drafts = (last[:, None] + np.arange(1, x.batch[1] + 1)) % VOCAB
        n = len(lengths)
        return RoundOutput(
            results=np.column_stack([lengths - forced, last]),
            logprobs=np.zeros((n, 1, 1), np.float32),
            logprob_ids=np.zeros((n, 1, 1), np.int64),
            verify_seconds=np.zeros(1),
            drafts=drafts,
            next_candidate_ids=no_candidates(n)[0],
            next_candidate_probs=no_candidates(n)[1],
            draft_seconds=np.zeros(1),
        )


@pytest.fixture
def model() -> CountingModel:
    return CountingModel()


@pytest.fixture
def front(model: CountingModel) -> Iterator[Front]:
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = Settings(
        tokenizer="",
        engines="",
        mode="ensemble",
        eos_token_ids=frozenset({50}),
        slots=2,
        max_queue=1,
        max_seq_len=400,
        prefill_chunk=8,
        block_size=4,
        draft_tokens=3,
    )
    metrics = Metrics(Triton(), settings.block_size)
    front = Front(settings, tokenizer, None, model, metrics)
    yield front
    model.pause.set()
    front.close()
    metrics.close()


def _ask(front: Front, text: str = "w1", **values: object) -> FakeReply:
    inputs = {name: np.array([value]) for name, value in values.items()}
    reply = FakeReply()
    front.submit({"text_input": np.array([text.encode()], dtype=object), **inputs}, reply)
    return reply


def test_one_response_unless_a_stream_is_asked_for(front: Front) -> None:
    part, last = _ask(front, max_tokens=10).next()
    assert last
    assert part.token_ids == list(range(2, 12))
    assert (part.prompt_tokens, part.completion_tokens, part.rounds) == (1, [10], [3])
    assert part.finish_reason == ["length"]
    assert part.acceptance_length == [3.0]


def _stream(reply: FakeReply) -> list[Part]:
    """All parts of a stream that ends well."""
    parts = []
    while True:
        part, last = reply.next()
        parts.append(part)
        if last:
            return parts


def test_a_stream_gives_its_rounds_in_order(front: Front, model: CountingModel) -> None:
    """News that come while others are being sent are put together."""
    model.seconds = 0.01
    parts = _stream(_ask(front, max_tokens=100, stream=True, ignore_eos=True))
    assert len(parts) > 1
    assert [t for part in parts for t in part.token_ids] == [(2 + i) % VOCAB for i in range(100)]
    assert [t for part in parts for t in part.round_tokens] == [4] * 24 + [3]
    assert "".join(part.text_output[0] for part in parts).split() == [
        f"w{(2 + i) % VOCAB}" for i in range(100)
    ]
    assert [part.finish_reason for part in parts] == [[""]] * (len(parts) - 1) + [["length"]]
    totals = [part.completion_tokens[0] for part in parts]
    assert totals == np.cumsum([len(part.token_ids) for part in parts]).tolist()


def test_end_of_text_ends_it_unless_ignored(front: Front) -> None:
    part, _ = _ask(front, "w45", max_tokens=20).next()
    assert part.finish_reason == ["stop"]
    assert part.token_ids == [46, 47, 48, 49, 50]
    part, _ = _ask(front, "w45", max_tokens=20, ignore_eos=True).next()
    assert part.finish_reason == ["length"]
    assert len(part.token_ids) == 20


def test_max_tokens_defaults_to_128_or_what_fits(front: Front) -> None:
    assert _ask(front, ignore_eos=True).next()[0].completion_tokens == [128]
    long = " ".join(["w1"] * 390)
    assert _ask(front, long, ignore_eos=True).next()[0].completion_tokens == [10]


def test_a_failing_round_fails_its_requests_only(front: Front, model: CountingModel) -> None:
    model.error = RuntimeError("secret path /opt/x")
    code, message = _ask(front).next()
    assert code == "INTERNAL"
    assert "secret" not in message
    assert _ask(front, max_tokens=3).next()[0].token_ids == [2, 3, 4]


def test_a_cancelled_request_stops(front: Front, model: CountingModel) -> None:
    model.pause.clear()
    reply = _ask(front, max_tokens=300, stream=True, ignore_eos=True)
    reply.gone.set()
    model.pause.set()  # the round that waited may still run, and no other
    deadline = time.monotonic() + WAIT
    while (got := reply.next())[0] != "CANCELLED":
        assert time.monotonic() < deadline
        assert not got[1], "ran to its end"
    time.sleep(0.1)
    assert model.rounds <= 1


def test_a_full_queue_refuses_at_once(front: Front, model: CountingModel) -> None:
    model.pause.clear()
    held = [_ask(front, max_tokens=4) for _ in range(3)]  # 2 slots + 1 in the queue
    code, message = _ask(front).next()
    assert code == "UNAVAILABLE"
    assert "full" in message
    model.pause.set()
    assert [reply.next()[0].token_ids for reply in held] == [[2, 3, 4, 5]] * 3
    assert _ask(front, max_tokens=1).next()[0].token_ids == [2]


@pytest.mark.parametrize(
    ("text", "values", "words"),
    [
        (b"", {}, "empty"),
        (b"\xff\xfe", {}, "UTF-8"),
        (b"w1", {"max_tokens": 0}, "max_tokens is 0"),
        (b"w1", {"max_tokens": 400}, "exceed"),
        (b"w1", {"temperature": -1.0}, "temperature is -1"),
        (b"w1", {"temperature": float("nan")}, "temperature is nan"),
        (b"w1", {"temperature": float("inf")}, "temperature is inf"),
        (b"w1", {"top_p": 0.0}, "top_p is 0"),
        (b"w1", {"top_p": 1.5}, "top_p is 1.5"),
        (b"w1", {"top_p": float("nan")}, "top_p is nan"),
        (b"w1", {"top_k": -1}, "top_k is -1"),
        (b"w1", {"seed": np.uint64(2**63)}, "seed is"),
    ],
)
def test_a_bad_request_is_refused(front: Front, text: bytes, values: dict, words: str) -> None:
    inputs = {name: np.array([value]) for name, value in values.items()}
    reply = FakeReply()
    front.submit({"text_input": np.array([text], dtype=object), **inputs}, reply)
    code, message = reply.next()
    assert code == "INVALID_ARG"
    assert words in message
    assert "\n" not in message
    assert _ask(front, max_tokens=1).next()[0].token_ids == [2]


def test_closing_answers_what_is_open(front: Front, model: CountingModel) -> None:
    model.pause.clear()
    reply = _ask(front, max_tokens=300, ignore_eos=True)
    closer = threading.Thread(target=front.close)
    closer.start()
    model.pause.set()
    assert reply.next()[0] == "UNAVAILABLE"
    closer.join(WAIT)
    assert not closer.is_alive()
