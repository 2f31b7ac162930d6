"""The public model's logic: requests in, a decoder, text out.

A thread reads what Triton's threads take in, and puts it into the line. A decoder takes it from
there and has threads of its own: `groups.py` runs our engines, `llm.py` TensorRT-LLM. A further
thread sends.
Free of Triton's types: `model_repository/dflash` adapts them.
"""

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.build.settings import Settings
from dflash_trt.chat import Render
from dflash_trt.decoding import Request, Sequence, WaitingQueue
from dflash_trt.errors import RequestError
from dflash_trt.serving.front.admission import Admission
from dflash_trt.serving.front.control import Command, Status
from dflash_trt.serving.front.metrics import Metrics
from dflash_trt.serving.front.output_processor import OutputProcessor
from dflash_trt.serving.front.preprocessor import Preprocessor
from dflash_trt.serving.front.requests import number_of_choices, parse_request
from dflash_trt.serving.front.response_sender import Reply, RequestState, ResponseSender

log = logging.getLogger(__name__)

INVALID, UNAVAILABLE, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"  # Triton's names
CLOSE_TIMEOUT = 2.0  # seconds
NO_NUMBER = "The model's output for this request is not a number."
NO_TEXT = "The text of this request could not be given out. The server's log says why."
LATER = "Try again later."
STOPPING = f"The server is stopping. {LATER}"
FULL = f"The request queue is full. {LATER}"
GAVE_WAY = f"The request gave way to another client's: the queue is full. {LATER}"


class Deliver(Protocol):
    """Tells the front that a sequence has new tokens, or has ended.

    code, message: what its client hears when its finish_reason is "error".
    """

    def __call__(self, sequence: Sequence, code: str = ..., message: str = ...) -> None: ...


class Decoder(Protocol):
    """Gives the sequences of the line their tokens, from threads of its own."""

    def new_sequence(self, request: Request) -> Sequence:
        """To be put into the line. RequestError for a request that it cannot do."""

    def start(self, queue: WaitingQueue[Sequence], deliver: Deliver) -> None: ...

    def wake(self) -> None:
        """More is in the line, or a sequence was `dropped`: to be ended as "cancelled"."""

    def close(self, timeout: float) -> None: ...


class RequestHandler:
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
        self._queue: WaitingQueue[Sequence] = WaitingQueue()
        self._where: dict[Sequence, tuple[RequestState, OutputProcessor]] = {}
        most = settings.slots + settings.max_queue
        self._admission = Admission(most, settings.max_per_client)
        self._closing = False
        self._lock = threading.Lock()  # of _admission and _closing
        self._sender = ResponseSender(self._drop, self._close_stream, metrics)
        self._preprocessor = Preprocessor()
        decoder.start(self._queue, self._deliver)

    def submit(
        self,
        inputs: Mapping[str, "np.ndarray[Any, Any]"],
        reply: Reply,
        timeout: float | None = None,
        client: str = "",
        request_id: str = "",
    ) -> None:
        """Takes a request to be read and queued; one that finds the queue full is refused at once.

        timeout: seconds after which the request ends as it is; client: who asks. Clients take
        turns, and the one that holds most places gives way to others when all are taken.
        """
        received = time.monotonic()
        if not inputs:  # `serve` asks whether anybody is there: see `Health.answers`
            return reply.fail(INVALID, "The request has no inputs. Send at least text_input.")
        try:
            count = number_of_choices(inputs, self._admission.most_each)
        except RequestError as error:
            return self._refuse(reply, INVALID, str(error), request_id)
        with self._lock:
            giving_way = self._giving_way(client, count)
            refusal = self._refusal(client, count, sum(each.places for each in giving_way))
            if not refusal:  # before the prompt is looked at: it may be long
                for stream in giving_way:
                    self._admission.give_back(stream.client, stream.places)
                    stream.places = 0
                self._admission.take(client, count)
        if refusal:
            return self._refuse(reply, UNAVAILABLE, refusal, request_id)
        for stream in giving_way:
            self._sender.post(stream, None, (UNAVAILABLE, GAVE_WAY))
            self._drop(stream)
        deadline = None if timeout is None else received + timeout
        stream = RequestState(
            reply, False, deadline, [], client=client, places=count, request_id=request_id
        )
        self._preprocessor.put(partial(self._read, stream, inputs, received), client)

    def control(self, command: Command) -> Status:
        """Does what `control.Command` says; the state after it."""
        if command != "status":
            with self._lock:
                self._closing = True
        if command == "end":
            self._sender.close(CLOSE_TIMEOUT, UNAVAILABLE, STOPPING)
        return Status(self._admission.held, self._metrics.progress)

    def close(self) -> None:
        """Ends the threads; what is still open is told UNAVAILABLE."""
        self.control("end")
        self._preprocessor.close(CLOSE_TIMEOUT)
        self._decoder.close(CLOSE_TIMEOUT)

    def _refusal(self, client: str, count: int, given_up: int) -> str:
        if self._closing:
            return STOPPING
        if self._admission.missing(count) > given_up:
            return FULL
        if self._admission.too_many(client, count):
            return f"{self._admission.most_each} sequences are the most of one client. {LATER}"
        return ""

    def _giving_way(self, client: str, count: int) -> list[RequestState]:
        """Waiting requests, the newest of another client, that make room for so many sequences."""
        missing, found = self._admission.missing(count), list[RequestState]()
        other = self._admission.gives_way(client, count) if missing else None
        for sequence in self._queue.newest(other) if other is not None else ():
            stream, _ = self._where.get(sequence, (None, None))
            if stream is None or stream.begun or stream in found:
                continue
            found.append(stream)
            missing -= stream.places
            if missing <= 0:
                break
        return found

    def _read(
        self, stream: RequestState, inputs: Mapping[str, "np.ndarray[Any, Any]"], received: float
    ) -> None:
        """In the reader's thread: turns a request into sequences, or answers what is wrong."""
        if self._sender.stopping:
            return self._turn_away(stream, UNAVAILABLE, STOPPING)
        try:
            ask = parse_request(
                inputs, self._tokenizer, self._template, self._settings, stream.client
            )
            sequences = [self._decoder.new_sequence(request) for request in ask.choices]
            stream.streaming = ask.streaming
            stream.choices = [
                OutputProcessor(i, sequence, received, self._tokenizer, ask.stop_words, ask.prefix)
                for i, sequence in enumerate(sequences)
            ]
        except RequestError as error:
            return self._turn_away(stream, INVALID, str(error))
        except Exception:
            log.exception("a request could not be read", extra=stream.named)
            message = "The request could not be read. The server's log says why."
            return self._turn_away(stream, INTERNAL, message)
        if not self._sender.open(stream):  # closed since we looked
            return self._turn_away(stream, UNAVAILABLE, STOPPING)
        for choice in stream.choices:
            self._where[choice.sequence] = stream, choice
            self._queue.add(choice.sequence, stream.client, choice.sequence.request.priority)
        late = stream.deadline is not None and time.monotonic() >= stream.deadline
        if late or any(sequence.dropped for sequence in sequences):  # before it was in the line
            self._drop(stream)
        self._decoder.wake()

    def _turn_away(self, stream: RequestState, code: str, message: str) -> None:
        self._close_stream(stream)
        self._refuse(stream.reply, code, message, stream.request_id)

    def _refuse(self, reply: Reply, code: str, message: str, request_id: str) -> None:
        log.info("a request was refused: %s", code, extra={"request_id": request_id})
        self._metrics.finished("refused")
        reply.fail(code, message)

    # --- called by the decoder --------------------------------------------------------------------

    def _deliver(self, sequence: Sequence, code: str = INTERNAL, message: str = NO_NUMBER) -> None:
        """Hand a sequence's news to the outbox; code, message: why, if it ended with an error.

        Whatever is wrong with one of them, its client is answered and the decoder goes on.
        """
        if sequence not in self._where:  # it was heard of before
            return
        stream, choice = self._where[sequence]
        failure = (code, message) if sequence.finish_reason == "error" else None
        if sequence.finish_reason is not None:
            self._metrics.finished(sequence.finish_reason)
            del self._where[sequence]
        try:
            choice.count(self._metrics, streaming=stream.streaming)
            part = choice.output(final_only=not stream.streaming)
        except Exception:
            log.exception("a text could not be given out", extra=stream.named)
            part, failure = None, (INTERNAL, NO_TEXT)
        if part is not None or failure is not None:
            self._sender.post(stream, part, failure)
        if failure is not None:
            # its other choices are of no use any more
            self._drop(stream)

    # --- called by the outbox or under errors ---------------------------------------------------

    def _drop(self, stream: RequestState) -> None:
        """End a request's sequences: those in the line now, the others when the decoder looks."""
        for choice in stream.choices:
            sequence = choice.sequence
            sequence.dropped = True  # first: it may be about to be put into the line
            if self._queue.remove(sequence, sequence.request.client):
                sequence.finish_reason = "cancelled"
                self._deliver(sequence)
        self._decoder.wake()

    def _close_stream(self, stream: RequestState) -> None:
        with self._lock:
            self._admission.give_back(stream.client, stream.places)
            stream.places = 0
