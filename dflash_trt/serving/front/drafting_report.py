"""How a text was drafted, for requests that ask: who wrote each token, and what was proposed."""

import json
import math
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.chat import Spell, speller
from dflash_trt.decoding import Draft, Sequence
from dflash_trt.decoding.speculation import SOURCES

_speller = lru_cache(maxsize=1)(speller)


class DraftingReport:
    """Of one choice. Round 0 is the prefill, which brings the first token."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._sequence = sequence
        self._spell: Spell = _speller(tokenizer)
        self._texts: list[str] = []  # of all tokens
        self._rounds = self._tokens = 0  # told of

    def add(self, pieces: list[str], rest: str) -> None:
        """The text of each new token, and at the end what is left of an unfinished character."""
        self._texts += pieces
        if rest and self._texts:
            self._texts[-1] += rest

    def news(self) -> list[str]:
        """The rounds since the last call, each as JSON."""
        if not self._texts:
            return []
        prefill = [] if self._rounds else [1]
        new = self._sequence.committed_per_round[max(0, self._rounds - 1) :]
        found = []
        for count in prefill + new:
            told = {"round": self._rounds, "tokens": self._written(count)}
            found.append(json.dumps({**told, "proposal": self._proposal()}, ensure_ascii=False))
            self._rounds += 1
            self._tokens += count
        return found

    def _written(self, count: int) -> list[dict[str, Any]]:
        part = slice(self._tokens, self._tokens + count)
        known = [SOURCES[source] for source in self._sequence.sources[part]]
        sources: list[str | None] = [*known] or [None] * count  # TensorRT-LLM does not tell
        pairs = zip(self._texts[part], sources, strict=True)
        return [{"text": text, "source": source} for text, source in pairs]

    def _proposal(self) -> list[dict[str, Any]]:
        waiting = self._sequence.proposals
        if not (self._rounds and waiting):  # the prefill, or an engine that does not tell
            return []
        return [self._draft(draft) for draft in waiting.pop(0)]

    def _draft(self, draft: Draft) -> dict[str, Any]:
        known = not math.isnan(draft.logprob)
        return {
            "text": self._spell(draft.token).decode(errors="replace"),
            "source": SOURCES[draft.source],
            "accepted": draft.accepted,
            "probability": round(math.exp(draft.logprob), 4) if known else None,
            "parent": draft.parent,
        }
