"""What a request asks of its tokens beyond the greedy choice, as `verify` gets it with a row."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

import numpy as np
from pydantic import TypeAdapter

from dflash_trt.decoding.sampling import Float32, Int64, Sampling, weights


@dataclass(frozen=True)
class Rules:
    """One request's sampling, and the two facts about the request that its rules refer to."""

    sampling: Sampling
    prompt_tokens: int
    stop_ids: tuple[int, ...]  # not to be drawn before min_tokens

    @property
    def need_history(self) -> bool:
        """Whether the tokens so far matter, not just how many they are."""
        s = self.sampling
        return bool(
            s.bad_words or s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        )

    @property
    def greedy(self) -> bool:
        """Whether the target's best token is always the answer, and nothing else is asked for."""
        s = self.sampling
        return not (s.temperature or s.min_tokens or self.need_history) and s.logprobs is None

    def score_prompt(self, place: int) -> bool:
        """Whether tokens from this position on are a prompt chunk, and all of them are scored."""
        return self.sampling.prompt_logprobs and place < self.prompt_tokens

    @cached_property
    def only_temperature(self) -> bool:
        """Whether tokens are drawn by logits over a temperature, and nothing else."""
        s = self.sampling
        cut = s.top_k or s.top_p < 1 or s.min_p or s.min_tokens
        return bool(s.temperature) and not (cut or self.need_history)

    def weights(self, logits: Float32, length: int, history: Sequence[int]) -> Float32:
        """`sampling.weights` `[vocab]` of the token at position `length`.

        history: all tokens before it, or nothing unless `need_history`.
        """
        s = self.sampling
        if length - self.prompt_tokens < s.min_tokens and self.stop_ids:
            logits = logits.copy()
            logits[list(self.stop_ids)] = -np.inf
        if self.need_history:
            logits = self._with_penalties(logits, np.array(history, np.int64))
            for *before, last in s.bad_words:
                if list(history[len(history) - len(before) :]) == before:
                    logits[last] = -np.inf
        return weights(logits, s)

    def _with_penalties(self, logits: Float32, history: Int64) -> Float32:
        s = self.sampling
        seen, penalty = np.unique(history), np.float32(s.repetition_penalty)
        logits = logits.copy()
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        output, counts = np.unique(history[self.prompt_tokens :], return_counts=True)
        logits[output] -= np.float32(s.presence_penalty)
        logits[output] -= np.float32(s.frequency_penalty) * counts.astype(np.float32)
        return logits


def encode(rules: Rules) -> bytes:
    """As the ensemble's tensor carries them; empty for plain greedy decoding."""
    return b"" if rules.greedy else json.dumps(asdict(rules)).encode()


@lru_cache(maxsize=128)  # of a request's longest words each is 1 MB
def decode(encoded: bytes) -> Rules:
    """The inverse of `encode`; cached, since a request's rules stay the same round after round.

    ValueError or RequestError for what `encode` never gives.
    """
    return _RULES.validate_json(encoded, strict=True) if encoded else Rules(Sampling(), 0, ())


_RULES = TypeAdapter(Rules)
