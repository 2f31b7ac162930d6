"""The public model's logic: requests in, responses out.

Triton's threads `submit` requests; the preprocessor's thread parses them and queues their
sequences; a decoder takes them from the queue in its own threads (`engine_loop.py` over our
engines, `llm.py` over TensorRT-LLM); the response sender's thread sends the output. Free of
Triton's types: `model_repository/dflash` adapts them.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.chat import ChatModel, Render
from dflash_trt.decoding import Request, SequenceState, WaitingQueue
from dflash_trt.errors import RequestError
from dflash_trt.serving.channel import Command, HandlerStatus
from dflash_trt.serving.keys import MEASURING_CLIENT
from dflash_trt.serving.model.metrics import Metrics
from dflash_trt.serving.model.output_processor import OutputProcessor
from dflash_trt.serving.model.requests import ParsedRequest, number_of_choices, parse_request
from dflash_trt.serving.model.response_sender import Reply, RequestState, ResponseSender
from dflash_trt.serving.refusals import CLIENT_LIMIT, LATER, try_again_in
from dflash_trt.wire import Settings

log = logging.getLogger(__name__)

INVALID, UNAVAILABLE, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"  # Triton's names
CLOSE_TIMEOUT = 2.0  # seconds
RECENT = 60.0  # seconds in which ends of sequences tell how fast they end
NON_FINITE = "The model's output for this request is not a number."
NO_TEXT = "The text of this request could not be given out. The server's log says why."
NOT_READ = "The request could not be read. The server's log says why."
STOPPING = f"The server is stopping. {LATER}"


Result = TypeVar("Result")


class Deliver(Protocol):
    """Called for new tokens or an end; code, message: with the finish_reason "error"."""

    def __call__(self, sequence: SequenceState, code: str = ..., message: str = ...) -> None: ...


class Decoder(Protocol):
    def is_ready_for(self, request: Request) -> bool:
        """Return whether `new_sequence` returns at once: its grammar may take seconds to compile.

        Thread-safe, as that is.
        """

    def new_sequence(self, request: Request) -> SequenceState:
        """Return a sequence to queue; RequestError for a request that it cannot run."""

    def start(self, queue: WaitingQueue[SequenceState], deliver: Deliver) -> None: ...

    def wake(self) -> None:
        """Look at the queue and at `dropped` sequences, which must end as "cancelled"."""

    def load_drafter(self, engine: Path) -> None:
        """Have the drafter in this directory serve; any error leaves the old one. Thread-safe."""

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
        self._chat_model = ChatModel(tokenizer, template)
        self._decoder = decoder
        self._metrics = metrics
        self._queue: WaitingQueue[SequenceState] = WaitingQueue()
        self._open: dict[SequenceState, tuple[RequestState, OutputProcessor]] = {}
        self._limit = settings.slots + settings.max_queue
        self._client_limit = min(self._limit, settings.max_per_client or self._limit)
        self._admitted: Counter[str] = Counter()  # running and waiting sequences by client
        # when sequences that had a slot ended; two tell how fast
        self._ends: deque[float] = deque(maxlen=1 + settings.slots)
        self._closing = False
        self._lock = threading.Lock()  # of _admitted, _ends and _closing
        self._sender = ResponseSender(self._drop, self._release)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # chat templates and tokenizers are slow for long prompts
        self._preprocessor = threading.Thread(target=self._run_jobs, daemon=True)
        self._preprocessor.start()
        decoder.start(self._queue, self._deliver)

    def submit(
        self,
        inputs: Mapping[str, "np.ndarray[Any, Any]"],
        reply: Reply,
        timeout: float | None = None,
        client: str = "",
        request_id: str = "",
    ) -> None:
        """Accept or refuse at once; timeout: seconds, after which it ends with what it has."""
        received = time.monotonic()
        try:
            count = number_of_choices(inputs, self._client_limit)
            if client == MEASURING_CLIENT:  # takes no place in the queue
                count = 0
        except RequestError as error:
            return self._refuse(reply, INVALID, str(error), request_id)
        with self._lock:  # before parsing, because the prompt may be long
            refusal = self._reason_to_refuse(client, count)
            if not refusal:
                self._admitted[client] += count
        if refusal:
            return self._refuse(reply, UNAVAILABLE, refusal, request_id)
        deadline = None if timeout is None else received + timeout
        state = RequestState(reply, deadline, client, request_id, admitted=count)
        self._jobs.put(partial(self._parse_and_queue, state, inputs, received))

    def control(self, command: Command) -> HandlerStatus:
        match command:
            case "drain":
                self._refuse_new()
            case "end":
                self._refuse_new()
                self._sender.close(CLOSE_TIMEOUT, UNAVAILABLE, STOPPING)
            case "status":
                pass
        return HandlerStatus(self._admitted.total(), self._metrics.progress)

    def load_drafter(self, engine: Path) -> None:
        """Replace the drafter; see `Decoder.load_drafter`."""
        self._decoder.load_drafter(engine)

    def _refuse_new(self) -> None:
        with self._lock:
            self._closing = True

    def close(self) -> None:
        """End the threads; open requests fail with UNAVAILABLE."""
        self.control("end")
        self._jobs.put(None)
        self._preprocessor.join(CLOSE_TIMEOUT)
        self._decoder.close(CLOSE_TIMEOUT)

    def _reason_to_refuse(self, client: str, count: int) -> str:
        if self._closing:
            return STOPPING
        if self._admitted.total() + count > self._limit:
            return f"The request queue is full. {self._try_again(self._admitted.total())}"
        if self._admitted[client] + count > self._client_limit:
            again = self._try_again(self._admitted[client])
            return f"{self._client_limit} {CLIENT_LIMIT}. {again}"
        return ""

    def _try_again(self, before: int) -> str:
        """Say when so many sequences, which were admitted before, will have ended."""
        since = time.monotonic() - RECENT
        ends = [end for end in self._ends if end > since]
        if len(ends) < 2:
            return LATER
        seconds_per_end = (ends[-1] - ends[0]) / (len(ends) - 1)
        return try_again_in(before * seconds_per_end)

    def _refuse(self, reply: Reply, code: str, message: str, request_id: str) -> None:
        log.info("a request was refused: %s", code, extra={"request_id": request_id})
        self._metrics.count_end("refused")
        reply.fail(code, message)

    # --- in the preprocessor's thread, or in one of a request that waits for its grammar ----------

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # for example a response that cannot be sent
                log.exception("a request could not be read")

    def _parse_and_queue(
        self, state: RequestState, inputs: Mapping[str, "np.ndarray[Any, Any]"], received: float
    ) -> None:
        if self._sender.stopping:
            return self._release_and_refuse(state, UNAVAILABLE, STOPPING)
        parsed = self._or_refuse(
            state,
            lambda: parse_request(
                inputs, self._tokenizer, self._chat_model, self._settings, state.client
            ),
        )
        if parsed is None:
            return
        if all(self._decoder.is_ready_for(request) for request in parsed.choices):
            return self._queue_choices(state, parsed, received)
        # it waits in a thread of its own, or all others would wait with it
        arguments = state, parsed, received
        threading.Thread(target=self._queue_choices, args=arguments, daemon=True).start()

    def _queue_choices(self, state: RequestState, parsed: ParsedRequest, received: float) -> None:
        """Queue a request's sequences, once its grammar is compiled."""
        sequences = self._or_refuse(
            state, lambda: [self._decoder.new_sequence(request) for request in parsed.choices]
        )
        if sequences is None:
            return
        state.streaming = parsed.streaming
        state.choices = [
            OutputProcessor(
                i,
                sequence,
                received,
                self._tokenizer,
                parsed.stop_words,
                parsed.prefix,
                parsed.hidden,
                thinking=parsed.thinking,
            )
            for i, sequence in enumerate(sequences)
        ]
        if not self._sender.open(state):  # closed meanwhile
            return self._release_and_refuse(state, UNAVAILABLE, STOPPING)
        for choice in state.choices:
            self._open[choice.sequence] = state, choice
            self._queue.add(choice.sequence, choice.sequence.request.priority)
        late = state.deadline is not None and time.monotonic() >= state.deadline
        if late or any(sequence.dropped for sequence in sequences):  # before it was queued
            self._drop(state)
        self._decoder.wake()

    def _or_refuse(self, state: RequestState, read: Callable[[], Result]) -> Result | None:
        """Return what `read` does; None after an error, which the client gets."""
        try:
            return read()
        except RequestError as error:
            self._release_and_refuse(state, INVALID, str(error))
        except Exception:
            log.exception("a request could not be read", extra=state.log_fields)
            self._release_and_refuse(state, INTERNAL, NOT_READ)
        return None

    def _release_and_refuse(self, state: RequestState, code: str, message: str) -> None:
        self._release(state)
        self._refuse(state.reply, code, message, state.request_id)

    # --- called by the decoder --------------------------------------------------------------------

    def _deliver(
        self, sequence: SequenceState, code: str = INTERNAL, message: str = NON_FINITE
    ) -> None:
        """Pass a sequence's output to the sender; an error here fails only its request."""
        if sequence not in self._open:  # its end was already delivered
            return
        state, choice = self._open[sequence]
        failure = (code, message) if sequence.finish_reason == "error" else None
        if sequence.finish_reason is not None:
            if sequence.started is not None:
                with self._lock:
                    self._ends.append(time.monotonic())
            length = sequence.acceptance_length if sequence.request.drafting else 0.0
            self._metrics.count_end(sequence.finish_reason, length)
            del self._open[sequence]
        try:
            choice.count_new_tokens(self._metrics)
            chunk = choice.new_chunk(final_only=not state.streaming)
        except Exception:
            log.exception("a text could not be given out", extra=state.log_fields)
            chunk, failure = None, (INTERNAL, NO_TEXT)
        if chunk is not None or failure is not None:
            self._sender.put(state, chunk, failure)
        if failure is not None:  # its other choices are useless now
            self._drop(state)

    # --- called by the sender, or after errors ----------------------------------------------------

    def _drop(self, state: RequestState) -> None:
        """End a request's sequences: waiting ones now, others at the decoder's next look."""
        for choice in state.choices:
            sequence = choice.sequence
            sequence.dropped = True  # first, because it may be about to be queued
            if self._queue.remove(sequence):
                sequence.finish_reason = "cancelled"
                self._deliver(sequence)
        self._decoder.wake()

    def _release(self, state: RequestState) -> None:
        with self._lock:
            self._admitted[state.client] -= state.admitted
            if not self._admitted[state.client]:
                del self._admitted[state.client]
            state.admitted = 0
