"""What a caller asks for, and how far it has come."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dflash_trt.decoding.messages import DROPPED, RoundOutput
from dflash_trt.decoding.rules import Rules, encode
from dflash_trt.decoding.sampling import Float32, Int64, Sampling


@dataclass(frozen=True)
class Request:
    """Prompt token ids and how to continue them; a token of `stop_ids` ends the text."""

    prompt: Seq[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower is served first, among those of its client
    client: str = ""
    drafting: bool = True  # false: plain decoding, to compare with

    @cached_property
    def rules(self) -> Rules:
        """What the target needs to know to answer."""
        return Rules(self.sampling, len(self.prompt), tuple(sorted(self.stop_ids)))


@dataclass(eq=False)
class Sequence:
    """One request under way."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # generated so far
    # per token, those of a scored prompt first: its own, then the best; 0 for the prompt's first
    logprobs: list[list[float]] = field(default_factory=list)
    logprob_ids: list[list[int]] = field(default_factory=list)  # the ids of these
    sources: list[int] = field(default_factory=list)  # per token: its place in `offers.SOURCES`
    committed_per_round: list[int] = field(default_factory=list)  # after the prefill's first token
    drafted: int = 0  # draft tokens proposed
    accepted: int = 0  # draft tokens that are part of the text
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    position: int = 0  # tokens in the KV caches: prompt, then all generated but the last
    drafts: list[int] = field(default_factory=list)  # to be verified next
    # of the next drafts: ids `[D, k]` and probabilities, as in `messages.DraftOutput`
    candidates: tuple[Int64, Float32] | None = None
    held: int = 0  # tokens in the target's KV cache that the drafter has not seen
    lost: bool = field(init=False)  # whether it never will see them all: it drafts nothing here
    ends: Callable[[int], bool] | None = None  # told each token; whether the text ends with it
    started: float | None = None  # time.monotonic() of its first step
    dropped: bool = False  # nobody waits for it any more

    def __post_init__(self) -> None:
        self.rules = encode(self.request.rules)
        self.lost = not self.request.drafting
        # one stream of numbers per request: its text does not depend on what else is running
        self.random = np.random.default_rng(self.request.sampling.seed)

    @property
    def rounds(self) -> int:
        """Rounds after prefill."""
        return len(self.committed_per_round)

    @property
    def acceptance_length(self) -> float:
        """tau: tokens committed per round; the first token comes from prefill."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else 0.0

    @property
    def budget(self) -> int:
        """Tokens still wanted."""
        return self.request.max_tokens - len(self.tokens)

    def verified(self, tokens: int, wanted: int) -> None:
        """So many more are in the target's KV cache; wanted: drafts behind them, or DROPPED."""
        self.position += tokens
        self.held = self.held + tokens if wanted == 0 else 0
        self.lost = self.lost or wanted == DROPPED

    def score_prompt(self, output: RoundOutput, count: int) -> RoundOutput:
        """Take those of `count` prompt tokens, after the first one; what is left of the output."""
        if not self.logprobs:
            most = 1 + (self.request.sampling.logprobs or 0)
            self.logprobs.append([0.0] * most)
            self.logprob_ids.append([self.request.prompt[0]] * most)
        self.logprobs += output.logprobs[0, :count].tolist()
        self.logprob_ids += output.logprob_ids[0, :count].tolist()
        return output._replace(
            logprobs=output.logprobs[:, count:], logprob_ids=output.logprob_ids[:, count:]
        )

    def commit(self, tokens: Seq[int]) -> int:
        """Append what fits the budget, up to a stop token; returns how many were taken."""
        taken = 0
        for token in tokens[: self.budget]:
            self.tokens.append(token)
            taken += 1
            ends = self.ends is not None and self.ends(token)
            if ends or token in self.request.stop_ids:
                self.finish_reason = "stop"
                return taken
        if self.budget == 0:
            self.finish_reason = "length"
        return taken
