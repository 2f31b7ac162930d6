"""A request and the state of its decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dflash_trt.decoding.grammar import Grammar, Matcher
from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.messages import DISCARD, NO_DRAFT, Float32, Int64, RoundOutput
from dflash_trt.decoding.sampling import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.speculation import Proposal


@dataclass(frozen=True)
class Request:
    """Prompt token ids and how to continue them; a token of `stop_ids` ends the text."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # cached prefixes are shared only within the same salt
    drafting: bool = True  # false: plain decoding, for comparison
    always_drafts: bool = False  # draft in each round, whatever the policy chooses
    grammar: Grammar | None = None  # that the output must follow

    @cached_property
    def processor(self) -> LogitsProcessor:
        return LogitsProcessor(self.sampling, len(self.prompt), tuple(sorted(self.stop_ids)))


def check_request(request: Request, max_seq_len: int) -> None:
    """Raise RequestError if an engine of this maximum length can never run the request."""
    if not request.prompt:
        raise RequestError("The prompt is empty", "Send at least one token of text.")
    least = 0 if request.sampling.prompt_logprobs else 1
    if request.max_tokens < least:
        raise RequestError(f"max_tokens is {request.max_tokens}", f"Ask for at least {least}.")
    if len(request.prompt) + request.max_tokens > max_seq_len:
        raise RequestError(
            f"This model's maximum context length is {max_seq_len} tokens: the prompt's "
            f"{len(request.prompt)} and the {request.max_tokens} asked for exceed it",
            "Shorten the prompt, lower max_tokens, or build with a larger serving.max_seq_len.",
        )


class Draft(NamedTuple):
    token: int
    source: int  # index in `SOURCES`
    accepted: bool  # it is part of the text
    logprob: float  # under the target's unprocessed logits; NaN if unknown


@dataclass(eq=False)
class SequenceState:
    request: Request
    tokens: list[int] = field(default_factory=list)  # generated tokens
    # a list per token: its own log-probability, then the best. Prompt tokens come first, if
    # requested; the very first one has 0
    logprobs: list[list[float]] = field(default_factory=list)
    logprob_ids: list[list[int]] = field(default_factory=list)  # token ids of `logprobs`
    sources: list[int] = field(default_factory=list)  # index in `SOURCES` of each token
    committed_per_round: list[int] = field(default_factory=list)  # after the prefill's first token
    # drafts of each round not yet sent, if requested; TensorRT-LLM does not report them
    proposals: list[list[Draft]] = field(default_factory=list)
    drafted: int = 0  # draft tokens proposed
    accepted: int = 0  # draft tokens accepted
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    position: int = 0  # tokens in the target's KV cache: prompt and generated, but the last
    replayed: int = 0  # the last of them: drafts that a hybrid's state does not hold yet
    # for the next drafts: ids `[D, k]` and probabilities, as in `messages.DraftOutput`
    candidates: tuple[Int64, Float32] | None = None
    cached_tokens: int = 0  # prompt tokens loaded from the prefix cache
    stops: list[int] = field(default_factory=list)  # where a prompt chunk ends, to keep the state
    seen: int = 0  # tokens in the drafter's KV cache
    buffered: int = 0  # tokens whose features wait in a `FeatureBuffer`
    out_of_sync: bool = field(init=False)  # the drafter cannot catch up, and drafts no more here
    ends: Callable[[int], bool] | None = None  # whether a token ends the text
    started: float | None = None  # time.monotonic() of its first step
    dropped: bool = False  # the client is gone
    matcher: Matcher | None = None  # of the request's grammar
    failure: str = ""  # reason of an error, if known

    def __post_init__(self) -> None:
        self.encoded = self.request.processor.encode()
        self.out_of_sync = not self.request.drafting

    @property
    def rounds(self) -> int:
        return len(self.committed_per_round)

    @property
    def acceptance_length(self) -> float:
        """tau: tokens committed per round; the first token comes from prefill."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else 0.0

    @property
    def budget(self) -> int:
        """Tokens still to generate."""
        return self.request.max_tokens - len(self.tokens)

    @property
    def round_budget(self) -> int:
        """Budget passed to rounds; at most 1 if out of sync, which leaves no room for drafts."""
        return min(self.budget, 1) if self.out_of_sync else self.budget

    def advance(
        self, tokens: int, num_draft_tokens: int, *, accepted: int = 0, drafter_ran: bool
    ) -> None:
        """Count tokens added to the target's KV cache, a prompt's before its first commit.

        num_draft_tokens: wanted, or DISCARD. accepted: of the tokens, drafts.
        """
        self.position += tokens
        self.replayed = accepted
        self.out_of_sync = self.out_of_sync or num_draft_tokens == DISCARD
        self.buffered = 0 if drafter_ran or self.out_of_sync else self.buffered + tokens
        if drafter_ran and not self.out_of_sync:
            self.seen = self.position

    def load(self, tokens: int, seen: int, waiting: int = 0) -> None:
        """Record how many prompt tokens the target's and the drafter's caches hold.

        waiting: the last of `seen`, whose features the drafter has yet to take in.
        """
        self.position = self.cached_tokens = tokens
        self.seen, self.buffered = seen - waiting, waiting
        self.out_of_sync = self.out_of_sync or seen < tokens

    def lose_drafter(self) -> None:
        """Handle a drafter replacement: the new one has seen none of the tokens."""
        self.seen, self.candidates, self.out_of_sync = 0, None, True

    def score_prompt(self, output: RoundOutput, count: int) -> RoundOutput:
        """Store scores of `count` prompt tokens after the first; return the output without them."""
        most = 1 + (self.request.sampling.logprobs or 0)
        if not self.logprobs:
            self.logprobs.append([0.0] * most)
            self.logprob_ids.append([self.request.prompt[0]] * most)
        self.logprobs += output.logprobs[0, :count, :most].tolist()
        self.logprob_ids += output.logprob_ids[0, :count].tolist()
        return output._replace(
            logprobs=output.logprobs[:, count:], logprob_ids=output.logprob_ids[:, count:]
        )

    def commit(self, tokens: Sequence[int]) -> int:
        """Append tokens up to the budget or a stop token; return how many."""
        taken = 0
        for token in tokens[: self.budget]:
            self.tokens.append(token)
            taken += 1
            ends = self.ends is not None and self.ends(token)
            if self.matcher is not None:
                self.matcher.push(token)
                ends = ends or self.matcher.is_stopped
            if ends or token in self.request.stop_ids:
                self.finish_reason = "stop"
                break
        if self.budget == 0 and self.finish_reason is None:
            self.finish_reason = "length"
        if self.finish_reason is None and self.matcher is not None:
            self.failure = self.matcher.look_ahead()
            self.finish_reason = "error" if self.failure else None
        return taken

    def commit_row(
        self, tokens: Sequence[int], sources: Sequence[int], output: RoundOutput, i: int
    ) -> int:
        """Commit accepted drafts of these sources, the target's token and log-probabilities."""
        taken = self.commit(tokens)
        self.sources += [*sources, 0][:taken]
        if self.request.sampling.logprobs is not None:
            asked = 1 + self.request.sampling.logprobs
            self.logprobs += output.logprobs[i, :taken, :asked].tolist()
            self.logprob_ids += output.logprob_ids[i, :taken, :asked].tolist()
        return taken

    def end_round(
        self, proposal: Proposal | None, kept: int, committed: int, logprobs: Float32
    ) -> None:
        """Count the round's drafts and store them if requested.

        kept: accepted drafts that are in the text. logprobs: the row's of `RoundOutput`.
        """
        self.committed_per_round.append(committed)
        self.accepted += kept
        self.drafted += len(proposal.tokens) if proposal else 0
        if not self.request.sampling.include_drafting:
            return
        drafts, scores = [], logprobs[1:, -1].tolist()
        if proposal is not None:
            parts = zip(proposal.tokens, proposal.sources, scores, strict=False)
            drafts = [
                Draft(token, source, i < kept, score)
                for i, (token, source, score) in enumerate(parts)
            ]
        self.proposals.append(drafts)

    def take_candidates(self, ids: Int64, probs: Float32, most: int) -> None:
        """Store the candidates of at most `most` next drafts, within the budget."""
        count = max(0, min(self.round_budget - 1, most, len(ids)))
        if NO_DRAFT in ids[:count, 0]:
            count = ids[:, 0].tolist().index(NO_DRAFT)
        self.candidates = (ids[:count], probs[:count]) if count else None
