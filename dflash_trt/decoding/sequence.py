"""A request and the state of its decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dflash_trt.decoding.grammar import Grammar, Matcher
from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.messages import Candidates, Logprobs, SequenceResult
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
    fewest = 0 if request.sampling.prompt_logprobs else 1
    if request.max_tokens < fewest:
        raise RequestError(f"max_tokens is {request.max_tokens}", f"Ask for at least {fewest}.")
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
    # a list per token: its log-probability, then the best. Prompt tokens come first, if requested;
    # the very first one has 0
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
    candidates: Candidates | None = None  # for the next drafts
    cached_tokens: int = 0  # prompt tokens loaded from the prefix cache
    chunk_ends: list[int] = field(default_factory=list)  # positions where a prompt's state is kept
    seen: int = 0  # tokens in the drafter's KV cache
    buffered: int = 0  # tokens whose features are in a `FeatureBuffer`
    out_of_sync: bool = field(init=False)  # the drafter cannot catch up, and drafts no more here
    ends: Callable[[int], bool] | None = None  # whether a token ends the text
    started: float | None = None  # time.monotonic() of its first step
    dropped: bool = False  # the client is gone
    matcher: Matcher | None = None  # of the request's grammar
    failure: str = ""  # reason of an error, if known

    def __post_init__(self) -> None:
        self.out_of_sync = not self.request.drafting

    @property
    def sampled(self) -> bool:
        """Whether its request has a temperature."""
        return bool(self.request.sampling.temperature)

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

    def advance(self, tokens: int, result: SequenceResult) -> None:
        """Count tokens added to the target's KV cache, a prompt's before its first commit."""
        self.position += tokens
        self.replayed = result.accepted
        if result.buffered is None or self.out_of_sync:
            self.out_of_sync = True
            self.buffered = 0
            return
        self.buffered = result.buffered
        self.seen = self.position - self.buffered

    def load(self, tokens: int, seen: int, buffered: int = 0) -> None:
        """Record how many prompt tokens the target's and the drafter's caches hold.

        buffered: the last of `seen`, whose features the drafter has yet to take in.
        """
        self.position = tokens
        self.cached_tokens = tokens
        self.seen = seen - buffered
        self.buffered = buffered
        self.out_of_sync = self.out_of_sync or seen < tokens

    def lose_drafter(self) -> None:
        """Handle a drafter replacement: the new one has seen none of the tokens."""
        self.seen = 0
        self.buffered = 0
        self.candidates = None
        self.out_of_sync = True

    def score_prompt(self, logprobs: Logprobs, count: int) -> Logprobs:
        """Store scores of `count` prompt tokens after the first; return those that are left."""
        if not self.logprobs:
            width = logprobs.ids.shape[1]
            self.logprobs.append([0.0] * width)
            self.logprob_ids.append([self.request.prompt[0]] * width)
        self.logprobs += logprobs.values[:count].tolist()
        self.logprob_ids += logprobs.ids[:count].tolist()
        return Logprobs(logprobs.values[count:], logprobs.ids[count:])

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

    def commit_result(self, proposal: Proposal | None, result: SequenceResult) -> int:
        """Commit accepted drafts, the target's token and log-probabilities; return how many."""
        drafts = list[int]()
        sources = list[int]()
        if proposal is not None:
            drafts += proposal.tokens[: result.accepted]
            sources += proposal.sources[: result.accepted]
        taken = self.commit([*drafts, result.token])
        self.sources += [*sources, 0][:taken]
        if result.logprobs is not None:
            self.logprobs += result.logprobs.values[:taken].tolist()
            self.logprob_ids += result.logprobs.ids[:taken].tolist()
        return taken

    def end_round(self, proposal: Proposal | None, result: SequenceResult, committed: int) -> None:
        """Count the round's drafts and store them if requested.

        committed: tokens of the round in the text, which may end before its last accepted drafts.
        """
        accepted = min(result.accepted, committed)
        self.committed_per_round.append(committed)
        self.accepted += accepted
        if proposal is not None:
            self.drafted += len(proposal.tokens)
        if not self.request.sampling.include_drafting:
            return
        drafts = list[Draft]()
        if proposal is not None:
            parts = zip(proposal.tokens, proposal.sources, result.draft_logprobs, strict=True)
            for index, (token, source, logprob) in enumerate(parts):
                drafts.append(Draft(token, source, index < accepted, logprob))
        self.proposals.append(drafts)

    def take_candidates(self, candidates: Candidates, max_drafts: int) -> None:
        """Store the candidates of at most `max_drafts` next drafts, within the budget."""
        count = min(self.round_budget - 1, max_drafts, len(candidates.ids))
        self.candidates = None
        if count > 0:
            self.candidates = Candidates(candidates.ids[:count], candidates.probs[:count])
