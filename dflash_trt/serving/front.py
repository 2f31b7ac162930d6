"""The public model's logic: one thread runs the rounds of all requests and sends their text.

Triton's threads parse requests and put them into a queue; the scheduler thread alone touches the
scheduler. Free of Triton's types: `model_repository/dflash` adapts them.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.decoding.draft_length import DraftLength, measure
from dflash_trt.decoding.rounds import RunRound
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request, Sequence
from dflash_trt.errors import RequestError
from dflash_trt.serving.detokenize import Detokenizer
from dflash_trt.serving.requests import Part, parse_request
from dflash_trt.serving.settings import Settings

log = logging.getLogger(__name__)

INVALID, UNAVAILABLE, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"  # Triton's names
CLOSE_TIMEOUT = 2.0  # seconds


class Reply(Protocol):
    """Where the answer to one request goes."""

    def send(self, part: Part, *, last: bool) -> None: ...
    def fail(self, code: str, message: str) -> None: ...
    def cancelled(self) -> bool: ...


@dataclass
class _Stream:
    """A sequence on its way to a client."""

    sequence: Sequence
    reply: Reply
    streaming: bool
    detokenizer: Detokenizer
    seen: int = 0  # tokens given to the detokenizer
    sent: int = 0  # tokens sent to the client
    rounds_sent: int = 0
    text: str = ""  # text not sent yet


class Front:
    """Takes requests from any thread and answers them from its own."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, run_round: RunRound) -> None:
        self._settings = settings
        self._run_round = run_round
        self._tokenizer = tokenizer
        self._draft_length = DraftLength(settings.block_size, settings.draft_tokens)
        self._scheduler = self._new_scheduler()
        self._inbox: queue.SimpleQueue[tuple[Request, bool, Reply] | None] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}  # by id() of the sequence
        self._open = 0  # requests taken and not yet answered
        self._lock = threading.Lock()  # of _open
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, inputs: Mapping[str, np.ndarray[Any, Any]], reply: Reply) -> None:
        """Queues a request; bad ones, and those that find the queue full, are answered at once."""
        try:
            request, streaming = parse_request(inputs, self._tokenizer, self._settings)
        except RequestError as error:
            return reply.fail(INVALID, str(error))
        with self._lock:
            full = self._open >= self._settings.slots + self._settings.max_queue
            self._open += not full
        if full:
            return reply.fail(UNAVAILABLE, "The request queue is full. Try again later.")
        self._inbox.put((request, streaming, reply))

    def close(self) -> None:
        """Ends the thread after its current round; what is still open is told UNAVAILABLE."""
        self._inbox.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _new_scheduler(self) -> Scheduler:
        settings = self._settings
        return Scheduler(
            self._run_round,
            slots=settings.slots,
            max_seq_len=settings.max_seq_len,
            prefill_chunk=settings.prefill_chunk,
            draft_length=self._draft_length,
            max_queue=settings.slots + settings.max_queue,  # never reached: submit() counts
        )

    def _run(self) -> None:
        while True:
            try:
                if not self._take_requests():
                    break
                self._measure_costs()
                self._drop_cancelled()
                for sequence in self._scheduler.step():
                    self._send(self._streams[id(sequence)])
            except Exception:
                log.exception("a round failed")
                self._fail_all(INTERNAL, "A decoding round failed. The server's log says why.")
                self._scheduler = self._new_scheduler()
        stopping = "The server is stopping. Try again later."
        self._fail_all(UNAVAILABLE, stopping)
        while not self._inbox.empty():  # what came after the call to close
            item = self._inbox.get()
            if item is not None:
                item[2].fail(UNAVAILABLE, stopping)

    def _take_requests(self) -> bool:
        """Moves the inbox to the scheduler, waiting for one when idle; False: closed."""
        while not (self._scheduler.busy and self._inbox.empty()):
            item = self._inbox.get()
            if item is None:
                return False
            request, streaming, reply = item
            try:
                sequence = self._scheduler.submit(request)
            except RequestError as error:
                self._answered()
                reply.fail(INVALID, str(error))
                continue
            detokenizer = Detokenizer(self._tokenizer)
            self._streams[id(sequence)] = _Stream(sequence, reply, streaming, detokenizer)
        return True

    def _measure_costs(self) -> None:
        """Once, before the first round: earlier, the models that run a round are not loaded."""
        if self._draft_length.needs_costs:
            settings = self._settings
            measure(self._run_round, self._draft_length, settings.block_size, settings.slots)

    def _drop_cancelled(self) -> None:
        for stream in list(self._streams.values()):
            if stream.reply.cancelled():
                self._scheduler.cancel(stream.sequence)
                self._finish(stream)
                stream.reply.fail("CANCELLED", "The request was cancelled.")

    def _send(self, stream: _Stream) -> None:
        sequence = stream.sequence
        last = sequence.finish_reason is not None
        stream.text += stream.detokenizer.push(sequence.tokens[stream.seen :], last=last)
        stream.seen = len(sequence.tokens)
        if not last and not (stream.streaming and stream.text):
            return
        part = Part(
            text_output=stream.text,
            token_ids=sequence.tokens[stream.sent :],
            round_tokens=sequence.committed_per_round[stream.rounds_sent :],
            finish_reason=sequence.finish_reason or "",
            prompt_tokens=len(sequence.request.prompt),
            completion_tokens=len(sequence.tokens),
            rounds=sequence.rounds,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            acceptance_length=sequence.acceptance_length,
        )
        stream.text, stream.sent, stream.rounds_sent = "", stream.seen, sequence.rounds
        if last:
            self._finish(stream)
        stream.reply.send(part, last=last)

    def _finish(self, stream: _Stream) -> None:
        del self._streams[id(stream.sequence)]
        self._answered()

    def _answered(self) -> None:
        with self._lock:
            self._open -= 1

    def _fail_all(self, code: str, message: str) -> None:
        for stream in list(self._streams.values()):
            self._finish(stream)
            stream.reply.fail(code, message)
