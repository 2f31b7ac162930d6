"""Log-probabilities of an answer's tokens, in the forms of OpenAI's APIs."""

import codecs
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

from dflash_trt.chat import Span
from dflash_trt.checkpoints import Spell
from dflash_trt.serving.answer import Chunk

Json = dict[str, Any]
UTF8 = codecs.getincrementaldecoder("utf-8")
LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


def token_text(spell: Spell, token: int) -> str:
    return spell(token).decode(errors="replace")


def alternatives_of(chunk: Chunk) -> list[dict[int, float]]:
    """Return the best alternatives to each token with a log-probability, by id, best first."""
    if not chunk.top_logprobs:
        return [{} for _ in chunk.logprobs]
    pairs = zip(chunk.top_token_ids, chunk.top_logprobs, strict=True)
    return [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]


def chat_logprobs(spell: Spell, chunk: Chunk) -> list[Json]:
    """Return an entry for each token of a chunk."""

    def entry(token: int, logprob: float) -> Json:
        text, spelled = token_text(spell, token), list(spell(token))
        return {"token": text, "bytes": spelled, "logprob": max(logprob, LEAST)}

    entries = []
    tokens = zip(chunk.token_ids, chunk.logprobs, alternatives_of(chunk), strict=True)
    for token, logprob, top in tokens:
        alternatives = [entry(*pair) for pair in top.items()]
        entries.append({**entry(token, logprob), "top_logprobs": alternatives})
    return entries


def _drops_space(spelled: bytes, text: str) -> bool:
    """Return whether the decoder dropped the space that a text's first token begins with."""
    return spelled.startswith(b" ") and bool(text) and not text.startswith(" ")


class TextLogprobs:
    """Those of one text of `/v1/completions`, with each token's offset in it."""

    def __init__(self, spell: Spell, hidden: Collection[int], *, echo: bool) -> None:
        """hidden: see `ContentLogprobs`; echo: the prompt, which may show them, comes first."""
        self._spell = spell
        self._hidden = hidden
        self._echo = echo
        self._first_is_unknown = echo  # nothing predicts a prompt's first token
        self._tokens = 0  # earlier ones
        self._start = ""  # of the text: what is known of it while the prompt's tokens come
        self._length: int | None = None  # characters of earlier tokens; None: there was no text
        self._utf8 = UTF8("replace")

    def of(self, chunk: Chunk) -> Json:
        prompt = chunk.prompt_tokens if self._echo else 0
        if self._tokens <= prompt:
            self._start += chunk.text
        texts = [token_text(self._spell, token) for token in chunk.token_ids]
        values: list[float | None] = [max(value, LEAST) for value in chunk.logprobs]
        best: list[Json | None] = []
        for text, value, top in zip(texts, values, alternatives_of(chunk), strict=True):
            # the better of two with equal text; as in OpenAI's API always the token itself
            likeliest = {
                token_text(self._spell, token): max(logprob, LEAST)
                for token, logprob in reversed(top.items())
            }
            best.append({text: value, **likeliest})
        if self._first_is_unknown:
            values[0] = best[0] = None
            self._first_is_unknown = False
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": best,
            "text_offset": [self._next_offset(token, prompt) for token in chunk.token_ids],
        }

    def _next_offset(self, token: int, prompt: int) -> int:
        """Return the text offset where a token, or the character it is part of, begins."""
        offset = self._length or 0
        is_prompt = self._tokens < prompt
        self._tokens += 1
        spelled = self._spell(token)
        if token in self._hidden:
            text = spelled.decode(errors="replace")
            if not (is_prompt and self._start.startswith(text, offset)):
                return offset
        if self._length is None:
            offset = -1 if _drops_space(spelled, self._start) else 0
        self._length = offset + len(self._utf8.decode(spelled))
        return max(0, offset)


class ContentLogprobs:
    """Those of an answer's content alone, without its thoughts, calls and markers.

    Each token's entry waits for the content that the token is part of. hidden: ids of tokens that
    are not in the answer's text.
    """

    def __init__(self, spell: Spell, hidden: Collection[int]) -> None:
        self._spell = spell
        self._hidden = hidden
        self._waiting: deque[tuple[Span, Json]] = deque()
        self._length: int | None = None  # characters of earlier tokens; None: there was no text
        self._utf8 = UTF8("replace")

    def add(self, chunk: Chunk) -> None:
        entries = chat_logprobs(self._spell, chunk)
        for token, entry in zip(chunk.token_ids, entries, strict=True):
            if token in self._hidden:
                continue
            self._waiting.append((self._span(token, chunk.text), entry))

    def of(self, spans: Iterable[Span]) -> list[Json]:
        """Return the entries of tokens with characters in these spans of the text, in order."""
        entries = []
        for span in spans:
            while self._waiting and self._waiting[0][0].start < span.end:
                token_span, entry = self._waiting.popleft()
                if token_span.end > span.start:
                    entries.append(entry)
        return entries

    def _span(self, token: int, text: str) -> Span:
        """Return the characters of a token; of a part of one, the character that it is part of."""
        spelled = self._spell(token)
        if self._length is None:
            self._length = -1 if _drops_space(spelled, text) else 0
        start = self._length
        self._length += len(self._utf8.decode(spelled))
        return Span(start, max(self._length, start + 1))
