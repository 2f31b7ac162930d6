"""The public model's logic: requests in, a decoder, text out.

Triton's threads parse requests and put them into the line. A decoder takes them from there and has
threads of its own: `groups.py` runs our engines, `llm.py` TensorRT-LLM. A further thread sends.
Free of Triton's types: `model_repository/dflash` adapts them.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.decoding.line import Line
from dflash_trt.decoding.sequence import Request, Sequence
from dflash_trt.errors import RequestError
from dflash_trt.serving.chat import Render
from dflash_trt.serving.choice import Choice
from dflash_trt.serving.control import Status, Word
from dflash_trt.serving.metrics import Metrics
from dflash_trt.serving.outbox import Outbox, Reply, Stream
from dflash_trt.serving.requests import choices_asked, parse_request
from dflash_trt.serving.settings import Settings

log = logging.getLogger(__name__)

INVALID, UNAVAILABLE, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"  # Triton's names
CLOSE_TIMEOUT = 2.0  # seconds
NO_NUMBER = "The model's output for this request is not a number."
STOPPING = "The server is stopping. Try again later."


class Report(Protocol):
    """Tells the front that a sequence has new tokens, or has ended.

    code, message: what its client hears when its finish_reason is "error".
    """

    def __call__(self, sequence: Sequence, code: str = ..., message: str = ...) -> None: ...


class Decoder(Protocol):
    """Gives the sequences of the line their tokens, from threads of its own."""

    def check(self, request: Request) -> None:
        """RequestError for a request that it cannot do."""

    def start(self, line: Line, report: Report) -> None: ...

    def wake(self) -> None:
        """More is in the line, or a sequence was `dropped`: to be ended as "cancelled"."""

    def close(self, timeout: float) -> None: ...


class Front:
    """Takes requests from any thread and answers them from its own."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        template: Render | None,
        decoder: Decoder,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._template = template
        self._decoder = decoder
        self._metrics = metrics
        self._line = Line()
        self._where: dict[Sequence, tuple[Stream, Choice]] = {}
        self._open = 0  # sequences taken and not yet answered
        self._closing = False
        self._lock = threading.Lock()  # of _open and _closing
        self._outbox = Outbox(self._drop, self._close_stream)
        decoder.start(self._line, self._report)

    def submit(
        self,
        inputs: Mapping[str, "np.ndarray[Any, Any]"],
        reply: Reply,
        timeout: float | None = None,
    ) -> None:
        """Queues a request; bad ones, and those that find the queue full, are answered at once.

        timeout: seconds after which the request ends as it is.
        """
        received = time.monotonic()
        if not inputs:  # `serve` asks whether anybody is there: see `Health.answers`
            return reply.fail(INVALID, "The request has no inputs. Send at least text_input.")
        try:
            count = choices_asked(inputs)
        except RequestError as error:
            return self._refuse(reply, INVALID, str(error))
        with self._lock:
            most = self._settings.slots + self._settings.max_queue
            refusal = STOPPING if self._closing else ""
            if self._open + count > most:
                refusal = "The request queue is full. Try again later."
            self._open += 0 if refusal else count
        if refusal:  # before the prompt is looked at: it may be long
            return self._refuse(reply, UNAVAILABLE, refusal)
        try:
            ask = parse_request(inputs, self._tokenizer, self._template, self._settings)
            self._decoder.check(ask.choices[0])
        except Exception as error:
            self._answered(count)
            if isinstance(error, RequestError):
                return self._refuse(reply, INVALID, str(error))
            log.exception("a request could not be read")
            message = "The request could not be read. The server's log says why."
            return self._refuse(reply, INTERNAL, message)
        sequences = [Sequence(request) for request in ask.choices]
        choices = [
            Choice(i, sequence, received, self._tokenizer, ask.stop_words, ask.prefix)
            for i, sequence in enumerate(sequences)
        ]
        deadline = None if timeout is None else received + timeout
        stream = Stream(reply, ask.streaming, deadline, choices)
        if not self._outbox.open(stream):  # closed since we looked
            self._answered(count)
            return self._refuse(reply, UNAVAILABLE, STOPPING)
        for choice in choices:
            self._where[choice.sequence] = stream, choice
            self._line.put(choice.sequence)
        self._decoder.wake()

    def obey(self, word: Word) -> Status:
        """Does what `control.Word` says; the state after it."""
        if word != "status":
            with self._lock:
                self._closing = True
        if word == "end":
            self._outbox.close(CLOSE_TIMEOUT, UNAVAILABLE, STOPPING)
        return Status(self._open, self._metrics.progress)

    def close(self) -> None:
        """Ends the threads; what is still open is told UNAVAILABLE."""
        self.obey("end")
        self._decoder.close(CLOSE_TIMEOUT)

    # --- called by the decoder --------------------------------------------------------------------

    def _report(self, sequence: Sequence, code: str = INTERNAL, message: str = NO_NUMBER) -> None:
        """Hand a sequence's news to the outbox; code, message: why, if it ended with an error."""
        stream, choice = self._where[sequence]
        choice.count(self._metrics)
        part = choice.news(final_only=not stream.streaming)
        if sequence.finish_reason is not None:
            self._metrics.finished(sequence.finish_reason)
            del self._where[sequence]
        if part is not None:
            self._outbox.post(stream, part)
        if sequence.finish_reason == "error":
            # its other choices are of no use any more
            self._outbox.fail(stream, code, message)
            self._drop(stream)

    # --- called by the outbox or under errors ---------------------------------------------------

    def _drop(self, stream: Stream) -> None:
        """End a request's sequences: those in the line now, the others when the decoder looks."""
        for choice in stream.choices:
            sequence = choice.sequence
            if self._line.remove(sequence):
                sequence.finish_reason = "cancelled"
                self._report(sequence)
            sequence.dropped = True
        self._decoder.wake()

    def _refuse(self, reply: Reply, code: str, message: str) -> None:
        self._metrics.finished("refused")
        reply.fail(code, message)

    def _close_stream(self, stream: Stream) -> None:
        self._answered(len(stream.choices))

    def _answered(self, count: int) -> None:
        with self._lock:
            self._open -= count
