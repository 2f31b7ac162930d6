"""Continuous batching: sequences join and leave between rounds."""

import heapq
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from dflash_trt.decoding.grammar import Matcher
from dflash_trt.decoding.messages import (
    DISCARD,
    NO_HISTORY,
    Int32,
    Int64,
    RoundOutput,
    RunRound,
    all_texts_end,
    verify_input,
)
from dflash_trt.decoding.prefix_cache import PrefixCache
from dflash_trt.decoding.proposer import Proposer
from dflash_trt.decoding.sequence import Request, SequenceState, check_request
from dflash_trt.decoding.slots import Slots
from dflash_trt.engines import MAX_BUFFERED, most_verified
from dflash_trt.speculation import Fixed, Policy, Proposal, StepPlan

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """Queue by priority, then arrival. Thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []  # priority, arrival, item
        self._arrivals = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: T, priority: int = 0) -> None:
        """Add an item; a lower priority number is served first."""
        with self._lock:
            heapq.heappush(self._heap, (priority, self._arrivals, item))
            self._arrivals += 1

    def take(self) -> T | None:
        with self._lock:
            return heapq.heappop(self._heap)[2] if self._heap else None

    def remove(self, item: T) -> bool:
        with self._lock:
            kept = [entry for entry in self._heap if entry[2] is not item]
            removed = len(kept) < len(self._heap)
            if removed:
                heapq.heapify(kept)
                self._heap = kept
            return removed


CHUNK_BESIDE_ROUNDS = 128  # most prompt tokens beside rounds that verify fewer


@dataclass(slots=True)
class StepReport:
    """Statistics of one step; times in seconds."""

    round_trip: float  # the whole call of `run_round`
    verify: float
    draft: float
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
        self._without_drafter = 0  # see `_order_without_drafter`; set when sequences or plan change
        self._learns_for = 0  # sequences at the last choice; 0: the policy does not learn from it
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
    def kv_rows(self) -> int:
        """KV cache rows in use, one per token."""
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
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
            if not self._queue.remove(sequence):
                self._slots.free(sequence)

    def step(self) -> list[SequenceState]:
        """Run one prompt chunk or one round; return the sequences that changed."""
        self.report, slots = None, self._slots
        if slots.prefilling is None and len(slots.decoding) < self._max_slots:
            slots.prefilling = self._queue.take()
            if (new := slots.prefilling) is not None:
                new.started = time.monotonic()
                if self._expected == 1 and new.request.drafting:
                    self._policy.begin(bool(new.request.sampling.temperature))
                drafted = (
                    self._drafts_after_prompt(new) or self._order_without_drafter([new]) != DISCARD
                )
                slots.load(new, drafted=drafted)
        # alternate chunks and rounds: a long prompt delays others by one chunk at a time
        if slots.prefilling is not None and not (self._prefilled_last and slots.decoding):
            self._prefilled_last = True
            return self._prefill(slots.prefilling)
        self._prefilled_last = False
        return self._round() if slots.decoding else []

    def _prefill(self, sequence: SequenceState) -> list[SequenceState]:
        prompt, start, decoding = sequence.request.prompt, sequence.position, self._slots.decoding
        scored = sequence.request.sampling.prompt_logprobs
        most = self._prefill_chunk
        if decoding:  # a chunk about as long as a round
            most = min(most, max(CHUNK_BESIDE_ROUNDS, self._last_verified))
            left = len(prompt) - start
            most = -(-left // -(-left // most))  # chunks of equal size
        if scored:  # a scored chunk needs as many head rows as a round has
            most = min(most, self._max_verified - 1)
        stops = [place for place in sequence.stops if place > start]
        end = min(start + most, len(prompt), *stops)
        count, last = end - start, end == len(prompt)
        drafts = self._drafts_after_prompt(sequence)
        wanted = self._policy.draft_tokens if drafts else self._order_without_drafter([sequence])
        # run the drafter at the end of a prompt, or its cached blocks serve no request that drafts
        feed = sequence.buffered + count > MAX_BUFFERED or (last and self._slots.cache is not None)
        if not wanted and feed:
            wanted = self._policy.draft_tokens
        row = [count, count, start, sequence.round_budget if last else 0, sequence.replayed]
        lines = [prompt[start : end + scored]]
        masks = _masks([sequence], [None]) if last else None
        output, report = self._run([sequence], len(decoding), [row], lines, wanted, masks)
        report.prompt_tokens = count
        if drafts and report.draft:
            sampled = bool(sequence.request.sampling.temperature)
            policy = self._policy_for([sequence])
            policy.prefilled(self._expected, sampled, report.draft)
        if scored:
            output = sequence.score_prompt(output, count - last)
        ran = _drafter_ran(wanted, [row], output)
        sequence.advance(count, wanted, drafter_ran=ran)
        if not last and output.results[0, 0] >= 0:
            if end in sequence.stops:
                self._slots.store_prompt(sequence)
            return []
        self._slots.prefilling = None
        decoding.append(sequence)
        self._without_drafter = self._order_without_drafter(decoding)
        self._commit([sequence], None, output, report, wanted, ran)
        if sequence.finish_reason is None:
            self._slots.store_prompt(sequence)
        return [sequence]

    def _drafts_after_prompt(self, sequence: SequenceState) -> bool:
        policy, sampled = self._policy_for([sequence]), bool(sequence.request.sampling.temperature)
        return sequence.request.drafting and policy.prefill(self._expected, sampled)

    @property
    def _expected(self) -> int:
        """Sequences that will decode together once those that wait have a slot."""
        return min(self.active + len(self._queue), self._max_slots)

    def _policy_for(self, sequences: Sequence[SequenceState]) -> Policy:
        """Return the policy; if one sequence always drafts, the whole batch does."""
        most = self._policy.draft_tokens
        always = most and any(sequence.request.always_drafts for sequence in sequences)
        return Fixed(most) if always else self._policy

    def _round(self) -> list[SequenceState]:
        start = time.perf_counter()
        sequences = list(self._slots.decoding)
        plan = StepPlan([None] * len(sequences), 0)
        if not any(sequence.request.drafting for sequence in sequences):
            self._without_drafter, self._learns_for = DISCARD, 0  # nothing to learn
        else:
            plan = self._choose(sequences)
        report = self._run_plan(sequences, plan)
        if len(sequences) == self._learns_for:
            took = time.perf_counter() - start - report.draft
            self._policy.timed(took, report.draft)
        return sequences

    def _choose(self, sequences: Sequence[SequenceState]) -> StepPlan:
        context = sum(sequence.position for sequence in sequences) // len(sequences)
        rows = self._proposer.rows(sequences)
        self._without_drafter = self._order_without_drafter(sequences)
        policy = self._policy_for(sequences)
        # true: run the drafter now, or the next plain round overflows the buffer
        full = max(x.buffered for x in sequences) > MAX_BUFFERED - self._max_verified
        plan = policy.choose(
            rows,
            context,
            feed=full and not self._without_drafter,
            waiting=len(self._queue) > 0,
            coming=self._expected - len(sequences),
        )
        self._learns_for = len(sequences) if policy is self._policy else 0  # 0: nothing to learn
        return plan

    def _order_without_drafter(self, sequences: Sequence[SequenceState]) -> int:
        """Return the draft tokens to request if the drafter does not run: 0 or DISCARD."""
        if not any(sequence.request.drafting for sequence in sequences):
            return DISCARD
        budget = max(sequence.budget for sequence in sequences)
        return 0 if self._policy.keeps_features(budget) else DISCARD

    def _run_plan(self, sequences: Sequence[SequenceState], plan: StepPlan) -> StepReport:
        rows, lines = [], []
        for sequence, proposal in zip(sequences, plan.chosen, strict=True):
            line = [sequence.tokens[-1], *(proposal.tokens if proposal else ())]
            budget, replayed = sequence.round_budget, sequence.replayed
            rows.append([len(line), 1, sequence.position, budget, replayed])
            lines.append(line)
        self._last_verified = len(rows) * (1 + plan.width)
        wanted = plan.draft_tokens or self._without_drafter
        masks = _masks(sequences, plan.chosen)
        output, report = self._run(sequences, 0, rows, lines, wanted, masks)
        ran = _drafter_ran(wanted, rows, output)
        self._commit(sequences, plan, output, report, wanted, ran)
        return report

    def _run(
        self,
        sequences: Sequence[SequenceState],
        slot: int,
        rows: Sequence[Sequence[int]],
        lines: Sequence[Sequence[int]],
        wanted: int,
        masks: Int32 | None,
    ) -> tuple[RoundOutput, StepReport]:
        sampling = history = None
        if any(sequence.encoded for sequence in sequences):
            sampling = np.array([sequence.encoded for sequence in sequences], object)
            if any(sequence.request.processor.needs_history for sequence in sequences):
                history = _history(sequences)
        batch = [self._slots.first + slot, wanted, self._proposer.candidates]
        batch += self._slots.take_copies()
        x = verify_input(batch, rows, lines, sampling, history, masks)
        start = time.perf_counter()
        output = self._run_round(x)
        self._slots.confirm_copies()
        round_trip = time.perf_counter() - start
        self.report = StepReport(round_trip, output.verify_seconds, output.draft_seconds)
        return output, self.report

    def _commit(
        self,
        sequences: Sequence[SequenceState],
        plan: StepPlan | None,
        output: RoundOutput,
        report: StepReport,
        wanted: int,
        drafter_ran: bool,
    ) -> None:
        """Commit a step's output and store the next candidates; plan: None after a prompt."""
        for i, (accepted, token, _) in enumerate(output.results.tolist()):
            sequence, proposal = sequences[i], plan.chosen[i] if plan else None
            if accepted < 0:
                self.finish(sequence, "error")
                continue
            drafts = proposal.tokens if proposal else ()
            tokens = [*drafts[:accepted], token]
            sources = proposal.sources[:accepted] if proposal else []
            committed = sequence.commit_row(tokens, sources, output, i)
            if plan is not None:
                sequence.advance(accepted + 1, wanted, accepted=accepted, drafter_ran=drafter_ran)
                # a text may end before its last accepted drafts
                kept = min(accepted, committed)
                sequence.end_round(proposal, kept, committed, output.logprobs[i])
                report.sequences.append((len(drafts), kept))
                report.choices.append(proposal.kind if proposal else "plain")
                if proposal is not None and self._learns_for:
                    self._policy.observe(proposal, accepted)
            if sequence.finish_reason is not None:
                self._slots.free(sequence)
                continue
            sequence.candidates = None
            if wanted > 0:
                sequence.take_candidates(output.candidate_ids[i], output.candidate_probs[i], wanted)


def _drafter_ran(wanted: int, rows: Sequence[Sequence[int]], output: RoundOutput) -> bool:
    return wanted > 0 and not all_texts_end(rows, output.results.tolist())


def _history(sequences: Sequence[SequenceState]) -> Int64:
    """Return `[n, L]` tokens in the caches, for rows whose logits depend on them."""
    lines = [
        [*s.request.prompt, *s.tokens][: s.position] if s.request.processor.needs_history else []
        for s in sequences
    ]
    longest = max(1, *map(len, lines))
    return np.array([line + [NO_HISTORY] * (longest - len(line)) for line in lines])


def _masks(sequences: Sequence[SequenceState], chosen: Sequence[Proposal | None]) -> Int32 | None:
    """Return grammar masks after each anchor and draft, None if all tokens are allowed."""
    found = [
        sequence.matcher.masks(proposal.tokens if proposal else ())
        if sequence.matcher is not None
        else []
        for sequence, proposal in zip(sequences, chosen, strict=True)
    ]
    words = max((len(mask) for row in found for mask in row if mask is not None), default=0)
    if not words:
        return None
    width = 1 + max(len(proposal.tokens) if proposal else 0 for proposal in chosen)
    masks = np.full((len(sequences), width, words), -1, np.int32)
    for line, row in zip(masks, found, strict=True):
        for node, mask in enumerate(row):
            if mask is not None:
                line[node] = mask
    return masks
