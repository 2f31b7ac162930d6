"""A sequence on its way to a client: its tokens become text, up to a stop command."""

import time
from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

from dflash_trt.decoding import Sequence
from dflash_trt.decoding.speculation import SOURCES
from dflash_trt.serving.front.detokenize import Detokenizer
from dflash_trt.serving.front.metrics import Metrics
from dflash_trt.serving.front.request_output import RequestOutput
from dflash_trt.serving.front.stop_words import StopWords


class OutputProcessor:
    """One of a request's answers; used by the thread that decodes its sequence."""

    def __init__(
        self,
        index: int,
        sequence: Sequence,
        received: float,
        tokenizer: Tokenizer,
        stop_words: Seq[str],
        prefix: str,
        hidden: frozenset[int] = frozenset(),
        *,
        thinking: bool = False,
    ) -> None:
        """received: time.monotonic() of the request; prefix: what its text starts with.

        hidden: special tokens that are no text; thinking: see `RequestOutput`.
        """
        self.index = index
        self.sequence = sequence
        self._received = received
        self._first_token: float | None = None  # when it came, of a stream when it was sent
        self._sent = False
        self._last_token = 0.0
        self._counted = 0  # tokens that the metrics know of
        self._thinking = thinking
        self._detokenizer = Detokenizer(tokenizer, sequence.request.stop_ids | hidden)
        self._stop_words = StopWords(stop_words) if stop_words else None
        self._text = prefix  # not yet given out
        self._seen = 0  # tokens given to the detokenizer
        request = sequence.request  # its prompt is given out with its log-probabilities
        self._prompt = [*request.prompt] if request.sampling.prompt_logprobs else []
        self._given = 0  # tokens given out
        self._rounds_given = 0
        self._failed: Exception | None = None  # why its text cannot be given out
        if stop_words:
            # token by token: the text ends within a round
            sequence.ends = self._ends

    def _ends(self, token: int) -> bool:
        try:
            return self._stops(token)
        except Exception as error:  # it is this sequence's alone: see `output`
            self._failed = error
            return True

    def _stops(self, token: int) -> bool:
        text = self._detokenizer.push([token])
        self._seen += 1
        if self._stop_words is None or self._seen < self.sequence.request.sampling.min_tokens:
            self._text += text
            return False
        piece, found = self._stop_words.push(text)
        self._text += piece
        if found:
            self._stop_words = None  # what stands behind it is not given out
        return found

    def count(self, metrics: Metrics, *, streaming: bool) -> None:
        """Tell the metrics of the tokens that have come since the last time.

        streaming: the first one counts when it was `sent`.
        """
        new, now = len(self.sequence.tokens) - self._counted, time.monotonic()
        if not new:
            return
        if self._first_token is None:
            self._first_token = now
            queued = (self.sequence.started or now) - self._received
            metrics.started(queued=queued)
            if not streaming:
                metrics.first_token(now - self._received)
        else:
            metrics.tokens(new, now - self._last_token)
        self._counted, self._last_token = self._counted + new, now

    def sent(self, metrics: Metrics) -> None:
        """A part of a stream was: the first one ends the wait for the first token."""
        if not self._sent:
            self._sent = True
            self._first_token = time.monotonic()
            metrics.first_token(self._first_token - self._received)

    def output(self, *, final_only: bool) -> RequestOutput | None:
        """What has come since the last time; None if it is nothing to give out yet."""
        if self._failed is not None:
            raise self._failed
        sequence = self.sequence
        last = sequence.finish_reason is not None
        if sequence.ends is None:
            self._text += self._detokenizer.push(sequence.tokens[self._seen :], last=last)
            self._seen = len(sequence.tokens)
        elif last and self._stop_words is not None:
            piece, _ = self._stop_words.push(self._detokenizer.push([], last=True))
            self._text += piece + self._stop_words.rest()
        if not last and (final_only or not self._text):
            return None
        start, prompt = self._given, len(self._prompt)
        self._given = prompt + len(sequence.tokens)
        rounds, self._rounds_given = self._rounds_given, sequence.rounds
        text, self._text = self._text, ""
        echoed, begin = self._prompt[start : len(sequence.logprobs)], max(0, start - prompt)
        return RequestOutput(
            index=[self.index],
            text_output=[text],
            finish_reason=[sequence.finish_reason or ""],
            token_ids=echoed + sequence.tokens[begin:],
            token_sources=[SOURCES.index("prompt")] * len(echoed) + sequence.sources[begin:],
            round_tokens=sequence.committed_per_round[rounds:],
            prompt_tokens=len(sequence.request.prompt),
            thinking=int(self._thinking),
            completion_tokens=[len(sequence.tokens)],
            rounds=[sequence.rounds],
            drafted=[sequence.drafted],
            accepted=[sequence.accepted],
            acceptance_length=[sequence.acceptance_length],
            time_to_first_token=[self._first_token - self._received if self._first_token else 0.0],
            token_logprobs=[values[0] for values in sequence.logprobs[start:]],
            top_token_ids=[ids[1:] for ids in sequence.logprob_ids[start:]],
            top_logprobs=[values[1:] for values in sequence.logprobs[start:]],
        )
