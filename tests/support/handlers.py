"""A front over a model that counts, and replies that are kept: no Triton, no engine."""

import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Candidates,
    DraftResult,
    Features,
    Logprobs,
    Round,
    RoundResult,
    RoundSequence,
    SequenceResult,
)
from dflash_trt.engines.info import EngineInfo, write_info
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.serving.answer import OUTPUTS, Chunk, to_arrays
from dflash_trt.serving.model.engine_loop import EngineLoop
from dflash_trt.serving.model.metrics import Metrics
from dflash_trt.serving.model.request_handler import RequestHandler
from dflash_trt.wire import Settings
from tests.support.triton_metrics import Triton

WAIT = 10.0
VOCAB = 100
BROKEN = EngineError("it is broken", "Give another")
BEST = 3  # log-probabilities of a place: the token's own and of so many less one


class Response(SimpleNamespace):
    """The output tensors that a client gets, as lists; one value for all choices is alone."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        arrays = to_arrays(chunks)
        for output in OUTPUTS.values():
            values = arrays[output.name].tolist() if output.name in arrays else []
            if output.datatype == "BYTES":
                values = [value.decode() for value in values]
            setattr(self, output.name, values[0] if output.dims == (1,) else values)


class FakeReply:
    def __init__(self) -> None:
        self.got: queue.Queue[tuple] = queue.Queue()
        self.gone = threading.Event()

    def send(self, chunks: Sequence[Chunk], *, last: bool) -> None:
        self.got.put((Response(chunks), last))

    def fail(self, code: str, message: str) -> None:
        self.got.put((code, message))

    def cancelled(self) -> bool:
        return self.gone.is_set()

    def next(self) -> tuple:
        return self.got.get(timeout=WAIT)


class CountingModel:
    """A target that counts up by one with an always right drafter; `pause` holds a round."""

    def __init__(self) -> None:
        self.pause = threading.Event()
        self.pause.set()
        self.error: Exception | None = None
        self.rounds = 0
        self.seconds = 0.0  # of a round
        self.prompts: list[int] = []  # first token of each prompt, in the order they were run
        self.drafter = Path("drafter")  # that drafts

    def __call__(self, round: Round) -> RoundResult:
        first = round.sequences[0]
        if first.position == 0:
            self.prompts.append(first.tokens[0])
        assert self.pause.wait(WAIT)
        self.rounds += 1
        time.sleep(self.seconds)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        results = [_count_up(sequence) for sequence in round.sequences]
        accepted = [result.accepted for result in results]
        if round.features_after(accepted) is not Features.DRAFT:
            return RoundResult(results, 0.0)
        candidates = [_next_numbers(sequence, round.draft_tokens) for sequence in round.sequences]
        return RoundResult(results, 0.0, DraftResult(candidates, 0.0))

    def load_drafter(self, engine: Path) -> None:
        if engine.name == "broken":
            raise BROKEN
        self.drafter = engine


def _count_up(sequence: RoundSequence) -> SequenceResult:
    """Accept all drafts; a token's log-probability is less by its number, as the next ones' are."""
    drafts = sequence.drafts
    token = (sequence.tokens[-1] + 1) % VOCAB
    ids = (token - len(drafts) + np.arange(1 + len(drafts))) % VOCAB
    ids = (ids[:, None] + np.arange(BEST)) % VOCAB
    count = 1 + (sequence.processor.sampling.logprobs or 0)
    logprobs = Logprobs(-ids[:, :count].astype(np.float32), ids[:, :count])
    requested = sequence.processor.sampling.logprobs is not None
    return SequenceResult(
        len(drafts),
        token,
        logprobs=logprobs if requested else None,
        draft_logprobs=[-float(draft) for draft in drafts],
    )


def _next_numbers(sequence: RoundSequence, count: int) -> Candidates:
    ids = (sequence.tokens[-1] + 2 + np.arange(count)) % VOCAB
    return Candidates(ids[:, None], np.ones((count, 1), np.float32))


@contextmanager
def open_front(
    model: CountingModel, triton: Triton | None = None, **values: object
) -> Iterator[RequestHandler]:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
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
        speculation=Speculation(draft_tokens=3),
    )
    settings = settings.model_copy(update=values)
    metrics = Metrics(triton or Triton(), settings.max_draft_tokens)
    with tempfile.TemporaryDirectory() as engines:
        for role in ("target", "drafter"):
            describe(role, Path(engines), settings)
        decoder = EngineLoop(settings, Path(engines), model, metrics, tokenizer)
    front = RequestHandler(settings, tokenizer, template, decoder, metrics)
    yield front
    model.pause.set()
    front.close()
    metrics.close()


def describe(role: str, engines: Path, settings: Settings) -> None:
    (engines / role).mkdir()
    info = EngineInfo(
        kind="onnxruntime",
        role=role,
        slots=settings.slots,
        max_seq_len=settings.max_seq_len,
        cache_len=settings.max_seq_len + 16,
        threads=1,
        vocab_size=VOCAB,
        best=1,
        pair_scores=False,
        block_size=settings.block_size,
        sample_from_anchor=False,
        mask_token_id=0,
        caches=((1, 8),),
        feature_size=1,
    )
    write_info(engines / role, info)


def template(**values: Any) -> str:
    if not all(isinstance(m["content"], str) for m in values["messages"]):
        raise RequestError("the chat template refuses the messages", "Send strings")
    last = values["add_generation_prompt"] and values.get("word", "w9")
    return " ".join([m["content"] for m in values["messages"]] + [last or "w8"])


def ask(
    front: RequestHandler,
    text: str | None = "w1",
    timeout: float | None = None,
    client: str = "",
    **values: Any,
) -> FakeReply:
    reply = FakeReply()
    submit(front, reply, text, timeout, client, **values)
    return reply


def submit(
    front: RequestHandler,
    reply: FakeReply,
    text: str | None = "w1",
    timeout: float | None = None,
    client: str = "",
    **values: Any,
) -> None:
    """Submit a request; strings and lists of them are sent as bytes."""
    if text is not None:
        values["text_input"] = text
    inputs = {}
    for name, value in values.items():
        elements = value if isinstance(value, list) else [value]
        words = isinstance(elements[0], str)
        encoded = [element.encode() for element in elements] if words else elements
        inputs[name] = np.array(encoded, dtype=object if words else None)
    front.submit(inputs, reply, timeout, client)
