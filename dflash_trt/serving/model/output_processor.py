"""Output of a sequence: text up to a stop word, and statistics."""

import codecs
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.checkpoints import Spell, speller
from dflash_trt.decoding import Draft, SequenceState
from dflash_trt.errors import panics_as_errors
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.model.metrics import Metrics
from dflash_trt.speculation import SOURCES

HOLE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not (yet) a character
LONGEST_CHARACTER = 4  # bytes, so tokens at most
UTF8 = codecs.getincrementaldecoder("utf-8")
_speller = lru_cache(maxsize=1)(speller)


@dataclass(frozen=True)
class Prefix:
    """What stands before a choice's text."""

    text: str = ""  # returned with it
    tokens: Sequence[int] = ()  # that the text continues; none: it is a text of its own


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces add up to the whole text.

    Every token is spelled as in the midst of a text, except a text's first one, whose space some
    decoders drop. How tokens are split into pushes changes nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int], prefix: Prefix | None = None
    ) -> None:
        """Begin behind a prefix, whose tokens' text is not returned; hidden: tokens without text.

        An unfinished character at the prefix's end is completed here.
        """
        prefix = prefix or Prefix()
        self._tokenizer = tokenizer
        self._spell: Spell = _speller(tokenizer)
        self._hidden = hidden
        # without a decoder spaces come between tokens, and so none before the first one
        joins = tokenizer.decoder is None
        self._begins = joins or all(token in hidden for token in prefix.tokens)
        self._utf8 = UTF8("replace")
        for token in prefix.tokens[-LONGEST_CHARACTER:]:
            self._utf8.decode(self._spell(token))
        unfinished, _ = self._utf8.getstate()
        # of bytes that the text does not complete, the prompt's text has the replacement
        self._drops_hole = bool(unfinished) and not prefix.text

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the new text; an unfinished character is withheld until `last`."""
        shown = [token for token in tokens if token not in self._hidden]
        text = self._utf8.decode(b"".join(map(self._next_bytes, shown)), final=last)
        if self._drops_hole and text:
            self._drops_hole = False
            return text.removeprefix(HOLE)
        return text

    def _next_bytes(self, token: int) -> bytes:
        spelled = self._spell(token)
        if not (self._begins and spelled):
            return spelled
        self._begins = False
        with panics_as_errors():
            text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return spelled if HOLE in text else text.encode()


class StopWords:
    """Withholds a possible stop word; returns only text before the first one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self.held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return the text that is certain, and the stop word found or ""."""
        self.held += text
        places = [(self.held.find(word), word) for word in self._words if word in self.held]
        if places:
            place, word = min(places)
            certain = self.held[:place]
            self.held = ""
            return certain, word
        cut = min(_possible_start(word, self.held) for word in self._words)
        certain = self.held[:cut]
        self.held = self.held[cut:]
        return certain, ""


def _possible_start(word: str, text: str) -> int:
    """Return where the text's end begins that may become the word; the text's length if nowhere."""
    place = text.find(word[0], max(0, len(text) - len(word) + 1))
    while place >= 0 and not word.startswith(text[place:]):
        place = text.find(word[0], place + 1)
    return len(text) if place < 0 else place


class DraftingReport:
    """Reports who wrote each token and what each round proposed; round 0 is the prefill."""

    def __init__(self, sequence: SequenceState, tokenizer: Tokenizer) -> None:
        self._sequence = sequence
        self._spell: Spell = _speller(tokenizer)
        self._texts: list[str] = []  # of all tokens
        self._rounds = self._tokens = 0  # already reported

    def add_texts(self, token_texts: list[str], unfinished_character: str) -> None:
        self._texts += token_texts
        if unfinished_character and self._texts:
            self._texts[-1] += unfinished_character

    def take_rounds(self) -> list[dict[str, Any]]:
        if not self._texts:
            return []
        prefill = [] if self._rounds else [1]
        new = self._sequence.committed_per_round[max(0, self._rounds - 1) :]
        rounds = []
        for count in prefill + new:
            report = {
                "round": self._rounds,
                "tokens": self._next_tokens(count),
                "proposal": self._next_proposal(),
            }
            rounds.append(report)
            self._rounds += 1
            self._tokens += count
        return rounds

    def _next_tokens(self, count: int) -> list[dict[str, Any]]:
        part = slice(self._tokens, self._tokens + count)
        known = [SOURCES[source] for source in self._sequence.sources[part]]
        sources: list[str | None] = [*known] or [None] * count  # TensorRT-LLM reports none
        pairs = zip(self._texts[part], sources, strict=True)
        return [{"text": text, "source": source} for text, source in pairs]

    def _next_proposal(self) -> list[dict[str, Any]]:
        waiting = self._sequence.proposals
        if not (self._rounds and waiting):  # prefill, or TensorRT-LLM
            return []
        return [self._draft(draft) for draft in waiting.pop(0)]

    def _draft(self, draft: Draft) -> dict[str, Any]:
        known = not math.isnan(draft.logprob)
        return {
            "text": self._spell(draft.token).decode(errors="replace"),
            "source": SOURCES[draft.source],
            "accepted": draft.accepted,
            "probability": round(math.exp(draft.logprob), 4) if known else None,
        }


class OutputProcessor:
    """The output of one choice, used by the thread that decodes its sequence."""

    def __init__(
        self,
        index: int,
        sequence: SequenceState,
        received: float,
        tokenizer: Tokenizer,
        stop_words: Sequence[str],
        prefix: Prefix,
        hidden: frozenset[int] = frozenset(),
        *,
        thinking: bool = False,
    ) -> None:
        """received: `time.monotonic()` of the request; the rest: as in `ParsedRequest`."""
        self.index = index
        self.sequence = sequence
        self._received = received
        self.first_token: float | None = None  # when it came
        self.last_token = 0.0  # time of the last tokens
        self._counted = 0  # tokens already counted in the metrics
        self._thinking = thinking
        request = sequence.request
        self._detokenizer = Detokenizer(tokenizer, request.stop_ids | hidden, prefix)
        self._report = None
        if request.sampling.include_drafting:
            self._report = DraftingReport(sequence, tokenizer)
        self._stop_words = StopWords(stop_words) if stop_words else None
        self._stop_word = ""  # the one that ended the text
        self._text = prefix.text  # not yet returned
        self._detokenized = 0  # tokens
        # with its log-probabilities the prompt is returned too
        self._prompt = [*request.prompt] if request.sampling.prompt_logprobs else []
        self._tokens_given = 0
        self._rounds_given = 0
        self._error: Exception | None = None  # why its text cannot be returned
        if stop_words:  # checked token by token: the text may end within a round
            sequence.ends = self._ends

    def _ends(self, token: int) -> bool:
        try:
            return self._stops(token)
        except Exception as error:  # raised again by `new_chunk`: only this sequence fails
            self._error = error
            return True

    def _stops(self, token: int) -> bool:
        text = self._detokenize([token])
        self._detokenized += 1
        min_tokens = self.sequence.request.sampling.min_tokens
        if self._stop_words is None or self._detokenized < min_tokens:
            self._text += text
            return False
        piece, self._stop_word = self._stop_words.push(text)
        self._text += piece
        if self._stop_word:
            self._stop_words = None  # the text ends here
        return bool(self._stop_word)

    def _detokenize(self, tokens: list[int], *, last: bool = False) -> str:
        if self._report is None:
            return self._detokenizer.push(tokens, last=last)
        pieces = [self._detokenizer.push([token]) for token in tokens]
        rest = self._detokenizer.push([], last=True) if last else ""
        self._report.add_texts(pieces, rest)
        return "".join(pieces) + rest

    def count_new_tokens(self, metrics: Metrics) -> None:
        new = len(self.sequence.tokens) - self._counted
        if not new:
            return
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now
            metrics.count_first_token(
                queue_seconds=(self.sequence.started or now) - self._received,
                first_token_seconds=now - self._received,
                cached_tokens=self.sequence.cached_tokens,
            )
        else:
            metrics.count_tokens(new, now - self.last_token)
        self._counted += new
        self.last_token = now

    def new_chunk(self, *, final_only: bool) -> Chunk | None:
        if self._error is not None:
            raise self._error
        sequence = self.sequence
        last = sequence.finish_reason is not None
        if sequence.ends is None:
            self._text += self._detokenize(sequence.tokens[self._detokenized :], last=last)
            self._detokenized = len(sequence.tokens)
        elif last and self._stop_words is not None:
            piece, _ = self._stop_words.push(self._detokenize([], last=True))
            self._text += piece + self._stop_words.held
        if not last and (final_only or not self._text):
            return None
        start = self._tokens_given
        rounds = self._rounds_given
        text = self._text
        self._tokens_given = len(self._prompt) + len(sequence.tokens)
        self._rounds_given = sequence.rounds
        self._text = ""
        echoed = self._prompt[start : len(sequence.logprobs)]
        begin = max(0, start - len(self._prompt))
        sources = [SOURCES[source] for source in sequence.sources[begin:]]
        return Chunk(
            text,
            self.index,
            finish_reason=sequence.finish_reason or "",
            stop_word=self._stop_word,
            token_ids=echoed + sequence.tokens[begin:],
            token_sources=["prompt"] * len(echoed) + sources,
            round_tokens=sequence.committed_per_round[rounds:],
            logprobs=[values[0] for values in sequence.logprobs[start:]],
            top_token_ids=[ids[1:] for ids in sequence.logprob_ids[start:]],
            top_logprobs=[values[1:] for values in sequence.logprobs[start:]],
            drafting=self._report.take_rounds() if self._report else [],
            thinking=self._thinking,
            prompt_tokens=len(sequence.request.prompt),
            cached_tokens=sequence.cached_tokens,
            completion_tokens=len(sequence.tokens),
            rounds=sequence.rounds,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            acceptance_length=sequence.acceptance_length,
            time_to_first_token=self.first_token - self._received if self.first_token else 0.0,
        )
