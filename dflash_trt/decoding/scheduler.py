"""Continuous batching: sequences join and leave between rounds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_trt.decoding.arrays import Int32
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.decoding.messages import Round, RoundResult, RoundSequence, RunRound, SequenceResult
from dflash_trt.decoding.prefix_cache import PrefixCache
from dflash_trt.decoding.proposer import Proposer, view
from dflash_trt.decoding.sequence import Request, SequenceState, check_request
from dflash_trt.decoding.slots import Slots
from dflash_trt.decoding.waiting_queue import WaitingQueue
from dflash_trt.engines import most_verified
from dflash_trt.speculation import Decision, Features, NextStep, Policy, Proposal

# prompt tokens of a chunk while others decode; more if their rounds have more
CHUNK_BESIDE_ROUNDS = 128


@dataclass(slots=True)
class StepReport:
    """Statistics of one step; times in seconds."""

    round_trip: float  # the whole call of `run_round`
    verify_seconds: float
    draft_seconds: float
    prompt_tokens: int = 0  # in the prompt chunk
    sequences: list[tuple[int, int]] = field(default_factory=list)  # see `Metrics.drafted`
    choices: list[str] = field(default_factory=list)  # kinds verified, of `VERIFIED`


class Scheduler:
    """Runs one prompt chunk or one round at a time. Not thread-safe."""

    def __init__(
        self,
        run_round: RunRound,
        *,
        slots: int,
        max_seq_len: int,
        prefill_chunk: int,
        policy: Policy,
        proposer: Proposer | None = None,
        queue: WaitingQueue[SequenceState] | None = None,
        first_slot: int = 0,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._run_round = run_round
        self._max_slots = slots
        self._max_seq_len = max_seq_len
        self._prefill_chunk = prefill_chunk
        self._policy = policy
        self._proposer = proposer or Proposer()
        self._max_verified = most_verified(policy.draft_tokens + 1)
        self._queue = WaitingQueue[SequenceState]() if queue is None else queue
        self._slots = Slots(first_slot, prefix_cache)
        self._prefilled_last = False
        self._last_verified = 0  # tokens verified in the last round
        self.report: StepReport | None = None  # of the last `step`; None: nothing ran

    @property
    def sequences(self) -> list[SequenceState]:
        """Sequences that have a slot."""
        return list(self._slots)

    @property
    def active(self) -> int:
        return len(self._slots)

    @property
    def has_work(self) -> bool:
        return self.active > 0 or len(self._queue) > 0

    @property
    def kv_entries(self) -> int:
        """KV entries in use, one per token."""
        return sum(sequence.position for sequence in self._slots)

    def forget(self) -> None:
        """Drop all cached prefixes after a failed step; this scheduler must not be used again."""
        self._slots.forget()

    def submit(self, request: Request, matcher: Matcher | None = None) -> SequenceState:
        """Queue a request with its grammar's matcher; RequestError if it can never run."""
        check_request(request, self._max_seq_len)
        sequence = SequenceState(request, matcher=matcher)
        self._queue.add(sequence, request.priority)
        return sequence

    def finish(self, sequence: SequenceState, reason: str) -> None:
        """End a sequence and free its slot; does nothing if it has ended."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if not self._queue.remove(sequence):
            self._slots.free(sequence)

    def step(self) -> list[SequenceState]:
        """Run one prompt chunk or one round; return the sequences that changed."""
        self.report = None
        slots = self._slots
        if slots.prefilling is None and len(slots.decoding) < self._max_slots:
            self._take_next()
        # alternate chunks and rounds: a long prompt delays others by one chunk at a time
        round_is_due = self._prefilled_last and slots.decoding
        if slots.prefilling is not None and not round_is_due:
            self._prefilled_last = True
            return self._prefill(slots.prefilling)
        self._prefilled_last = False
        if not slots.decoding:
            return []
        return self._decode(list(slots.decoding))

    def _take_next(self) -> None:
        """Give a slot to the next sequence that waits, and load its cached prefix."""
        sequence = self._queue.take()
        if sequence is None:
            return
        self._slots.prefilling = sequence
        sequence.started = time.monotonic()
        decision = self._policy.decide(self._prompt_step(sequence, 0, ends=False))
        self._slots.load(sequence, for_drafts=decision.features is not Features.DROP)

    def _prefill(self, sequence: SequenceState) -> list[SequenceState]:
        """Run the next chunk of a prompt; after the last one the sequence decodes."""
        decoding = self._slots.decoding
        chunk = self._next_chunk(sequence)
        count = chunk.known
        last = sequence.position + count == len(sequence.request.prompt)
        decision = self._policy.decide(self._prompt_step(sequence, count, ends=last))
        result, report = self._run([chunk], decision, slot=len(decoding))
        report.prompt_tokens = count
        (sequence_result,) = result.results
        if chunk.scores_prompt and sequence_result.logprobs is not None:
            scored = count - 1 if last else count  # the last one scores a generated token
            sequence_result.logprobs = sequence.score_prompt(sequence_result.logprobs, scored)
        sequence.advance(count, sequence_result)
        if not last and not sequence_result.failed:
            if sequence.position in sequence.chunk_ends:
                self._slots.store_prompt(sequence)
            return []
        self._slots.prefilling = None
        decoding.append(sequence)
        self._commit_prompt(sequence, result, decision.draft_tokens)
        return [sequence]

    def _prompt_step(self, sequence: SequenceState, new_tokens: int, *, ends: bool) -> NextStep:
        return NextStep(
            [view(sequence)],
            context=sequence.position,
            new_tokens=new_tokens,
            coming=self._expected - 1,
            is_prompt=True,
            fills_cache=ends and self._slots.cache is not None,
        )

    def _next_chunk(self, sequence: SequenceState) -> RoundSequence:
        """Return the next tokens of a prompt, with its grammar's mask after the last one."""
        prompt = sequence.request.prompt
        start = sequence.position
        scores = sequence.request.sampling.prompt_logprobs
        length = self._prefill_chunk
        if self._slots.decoding:  # a chunk about as long as a round
            length = min(length, max(CHUNK_BESIDE_ROUNDS, self._last_verified))
            remaining = len(prompt) - start
            chunks = -(-remaining // length)
            length = -(-remaining // chunks)  # of equal size
        if scores:  # then each of its tokens is scored, and a round scores so many
            length = min(length, self._max_verified - 1)
        chunk_ends = [position for position in sequence.chunk_ends if position > start]
        end = min(start + length, len(prompt), *chunk_ends)
        chunk = RoundSequence(
            prompt[start:end],
            known=end - start,
            position=start,
            budget=0,
            replayed=sequence.replayed,
            processor=sequence.request.processor,
            history=_history(sequence),
            follows=not sequence.out_of_sync,
        )
        if end < len(prompt):
            chunk.next_token = prompt[end] if scores else None
            return chunk
        chunk.budget = sequence.round_budget
        chunk.masks = _masks(sequence, None)
        return chunk

    def _commit_prompt(
        self, sequence: SequenceState, result: RoundResult, draft_tokens: int
    ) -> None:
        """Commit the first token after a prompt, and store the prompt in the prefix cache."""
        (sequence_result,) = result.results
        if sequence_result.failed:
            self.finish(sequence, "error")
            return
        sequence.commit_result(None, sequence_result)
        self._end_round(sequence, result, 0, draft_tokens)
        if sequence.finish_reason is None:
            self._slots.store_prompt(sequence)

    @property
    def _expected(self) -> int:
        """Sequences that will decode together once those that wait have a slot."""
        return min(self.active + len(self._queue), self._max_slots)

    def _decode(self, sequences: list[SequenceState]) -> list[SequenceState]:
        """Run one round for all sequences; the policy learns from it if it chose the round."""
        start = time.perf_counter()
        step = NextStep(
            self._proposer.views(sequences),
            context=sum(sequence.position for sequence in sequences) // len(sequences),
            new_tokens=self._max_verified,
            coming=self._expected - len(sequences),
            waiting=len(self._queue) > 0,
        )
        decision = self._policy.decide(step)
        report = self._execute(sequences, decision)
        if decision.learns:
            seconds = time.perf_counter() - start - report.draft_seconds
            self._policy.timed(seconds, report.draft_seconds)
        return sequences

    def _execute(self, sequences: Sequence[SequenceState], decision: Decision) -> StepReport:
        """Run a round and commit what it accepted."""
        brought = [
            _anchor_and_drafts(sequence, proposal)
            for sequence, proposal in zip(sequences, decision.proposals, strict=True)
        ]
        self._last_verified = len(brought) * (1 + decision.draft_len)
        result, report = self._run(brought, decision)
        for index, sequence in enumerate(sequences):
            sequence_result = result.results[index]
            proposal = decision.proposals[index]
            if sequence_result.failed:
                self.finish(sequence, "error")
                continue
            _commit_round(sequence, proposal, sequence_result, report)
            if proposal is not None and decision.learns:
                self._policy.observe(proposal, sequence_result.accepted)
            self._end_round(sequence, result, index, decision.draft_tokens)
        return report

    def _end_round(
        self, sequence: SequenceState, result: RoundResult, index: int, draft_tokens: int
    ) -> None:
        """Free the slot of a sequence that has ended; otherwise take the next candidates."""
        if sequence.finish_reason is not None:
            self._slots.free(sequence)
            return
        sequence.candidates = None
        if result.drafts is not None:
            sequence.take_candidates(result.drafts.candidates[index], draft_tokens)

    def _run(
        self, sequences: Sequence[RoundSequence], decision: Decision, slot: int = 0
    ) -> tuple[RoundResult, StepReport]:
        round = Round(
            self._slots.first + slot,
            sequences,
            decision.features,
            decision.draft_tokens,
            self._proposer.candidates,
            self._slots.take_copies(),
        )
        start = time.perf_counter()
        result = self._run_round(round)
        round_trip = time.perf_counter() - start
        self._slots.confirm_copies()
        self.report = StepReport(round_trip, result.verify_seconds, result.draft_seconds)
        return result, self.report


def _anchor_and_drafts(sequence: SequenceState, proposal: Proposal | None) -> RoundSequence:
    """Return the anchor and the drafts of a proposal, with their grammar's masks."""
    tokens = [sequence.tokens[-1]]
    if proposal is not None:
        tokens += proposal.tokens
    return RoundSequence(
        tokens,
        known=1,
        position=sequence.position,
        budget=sequence.round_budget,
        replayed=sequence.replayed,
        processor=sequence.request.processor,
        history=_history(sequence),
        masks=_masks(sequence, proposal),
        follows=not sequence.out_of_sync,
    )


def _commit_round(
    sequence: SequenceState, proposal: Proposal | None, result: SequenceResult, report: StepReport
) -> None:
    """Commit a sequence's tokens and count them in the report."""
    committed = sequence.commit_result(proposal, result)
    sequence.advance(result.accepted + 1, result)
    sequence.end_round(proposal, result, committed)
    drafted = 0 if proposal is None else len(proposal.tokens)
    # a text may end before its last accepted drafts
    report.sequences.append((drafted, min(result.accepted, committed)))
    report.choices.append("plain" if proposal is None else proposal.kind)


def _history(sequence: SequenceState) -> list[int]:
    """Return the tokens in the caches if logits depend on them."""
    request = sequence.request
    if not request.processor.needs_history:
        return []
    return [*request.prompt, *sequence.tokens][: sequence.position]


def _masks(sequence: SequenceState, proposal: Proposal | None) -> Sequence[Int32 | None]:
    """Return a grammar's masks after the anchor and each draft; empty if all tokens are allowed."""
    if sequence.matcher is None:
        return ()
    masks = sequence.matcher.masks(() if proposal is None else proposal.tokens)
    if all(mask is None for mask in masks):
        return ()
    return masks
