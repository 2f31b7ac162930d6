"""Continuous batching: sequences join and leave between rounds; active rows stay dense."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from dflash_trt.decoding.line import Line
from dflash_trt.decoding.messages import (
    DROPPED,
    FORGOTTEN,
    NO_DRAFT,
    NO_HISTORY,
    RoundOutput,
    RunRound,
    VerifyInput,
    chains,
    no_candidates,
    no_rules,
)
from dflash_trt.decoding.sampling import Int64
from dflash_trt.decoding.sequence import Request, Sequence
from dflash_trt.decoding.speculation import (
    SOURCES,
    Policy,
    Proposal,
    Proposer,
    Row,
    StepPlan,
    depths,
)
from dflash_trt.engines.info import HELD, most_verified
from dflash_trt.errors import RequestError


@dataclass(slots=True)
class StepReport:
    """What one step did; times in seconds."""

    round_trip: float  # the call of `run_round`, of which:
    verify: float
    draft: float
    prompt_tokens: int = 0  # of a prompt chunk
    sequences: list[tuple[int, int, int]] = field(default_factory=list)  # see `Metrics.drafted`
    choices: list[str] = field(default_factory=list)  # what was verified of each: see `_choice`


class Scheduler:
    """Runs one prompt chunk or one round at a time; to be used by a single thread.

    Sequences that decode hold the cache rows `first_row` .. first_row+n-1, the one being prefilled
    the next. Several schedulers may take from one line.
    """

    def __init__(
        self,
        run_round: RunRound,
        *,
        slots: int,
        max_seq_len: int,
        prefill_chunk: int,
        policy: Policy,
        proposer: Proposer | None = None,
        line: Line | None = None,
        first_row: int = 0,
    ) -> None:
        """proposer: makes the offers of an adaptive policy; a fixed one takes what was drafted."""
        self._run_round = run_round
        self._slots = slots
        self._max_seq_len = max_seq_len
        self._prefill_chunk = prefill_chunk
        self._policy = policy
        self._most_verified = most_verified(policy.draft_tokens + 1)
        self._proposer = proposer or Proposer()
        self._line = Line() if line is None else line
        self._first_row = first_row
        self._decoding: list[Sequence] = []
        self._prefilling: Sequence | None = None
        self._moves: list[tuple[int, int, Sequence]] = []  # from, to, which: see `VerifyInput`
        self._used = 0  # rows, in the last step
        self._prefilled_last = False
        self._wanted = 0  # drafts, in the last step
        self._unwanted = 0  # see `_undrafted`; as of the last choice
        self._offered: Seq[Row] = ()  # what the last choice chose from
        self._rest = 0  # rounds for which there is nothing to be chosen
        self._chosen_for = 0  # sequences
        self._choosing = 0.0  # seconds that the last choice took
        self.report: StepReport | None = None  # of the last call of `step`; None: nothing to do

    @property
    def sequences(self) -> list[Sequence]:
        """Those that hold a row."""
        return [*self._decoding, *([self._prefilling] if self._prefilling else [])]

    @property
    def active(self) -> int:
        """How many hold a row."""
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self.active > 0 or len(self._line) > 0

    @property
    def kv_rows(self) -> int:
        """Rows of the KV caches, of one token each, in use."""
        return sum(sequence.position for sequence in self.sequences)

    def submit(self, request: Request) -> Sequence:
        """Queue a request; RequestError when it can never run."""
        check_request(request, self._max_seq_len)
        sequence = Sequence(request)
        self._line.put(sequence)
        return sequence

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence now and free its row; one that has ended stays as it is."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence is self._prefilling:
            self._prefilling = None
        elif not self._line.remove(sequence):
            self._release(sequence)

    def step(self, take: bool = True) -> list[Sequence]:
        """Run one prompt chunk or one round; returns the sequences with news.

        take: whether a waiting sequence may join.
        """
        self.report = None
        if take and self._prefilling is None and len(self._decoding) < self._slots:
            self._prefilling = self._line.take()
            if self._prefilling is not None:
                self._prefilling.started = time.monotonic()
        # chunks and rounds take turns: a long prompt holds the others up by one chunk at a time
        if self._prefilling is not None and not (self._prefilled_last and self._decoding):
            self._prefilled_last = True
            return self._prefill(self._prefilling)
        self._prefilled_last = False
        return self._round() if self._decoding else []

    def _prefill(self, sequence: Sequence) -> list[Sequence]:
        prompt = sequence.request.prompt
        scored = sequence.request.sampling.prompt_logprobs
        # head rows are as many as in a round
        most = min(self._prefill_chunk, self._most_verified - 1) if scored else self._prefill_chunk
        end = min(sequence.position + most, len(prompt))
        chunk, last = prompt[sequence.position : end], end == len(prompt)
        budget = _budget(sequence) if last else 0
        rows = [[len(chunk), len(chunk), sequence.position, budget]]
        drawn = bool(sequence.request.sampling.temperature)
        n = self.active
        drafts = sequence.request.drafting and self._policy.prefill(n, drawn)
        wanted = self._policy.draft_tokens if drafts else self._undrafted([sequence])
        if not wanted and sequence.held + len(chunk) > HELD:
            wanted = self._policy.draft_tokens
        lines = [list(prompt[sequence.position : end + scored])]
        output, report = self._run([sequence], len(self._decoding), rows, lines, chains(1), wanted)
        report.prompt_tokens = len(chunk)
        if scored:
            output = sequence.score_prompt(output, len(chunk) - last)
        sequence.verified(len(chunk), wanted)
        if not last and output.results[0, 0] >= 0:
            return []
        # others go on as was chosen for them: many short texts would have a choice every few rounds
        goes_on = self._decoding and not drafts
        self._rest = min(self._rest, max(self._room([sequence]), 0)) if goes_on else 0
        self._prefilling = None
        self._decoding.append(sequence)
        self._unwanted = self._undrafted(self._decoding)
        self._take([sequence], [None], output, report)
        return [sequence]

    def _round(self) -> list[Sequence]:
        start = time.perf_counter()
        sequences = list(self._decoding)
        plain = not any(sequence.request.drafting for sequence in sequences)
        if plain:  # the policy learns nothing from it
            self._rest, self._unwanted, self._chosen_for = 0, DROPPED, 0
        if plain or self._rest:
            self._rest -= bool(self._rest)
            choice, self._offered = StepPlan([None] * len(sequences), 0), ()
        else:
            choice = self._choose(sequences)
            self._chosen_for, self._choosing = len(sequences), time.perf_counter() - start
        report = self._verify(sequences, choice)
        # of plain rounds in a row the last one, which took no time to choose
        if not self._rest and len(sequences) == self._chosen_for:
            took = time.perf_counter() - start - report.draft
            self._policy.timed(took, report.draft, self._choosing)
        return sequences

    def _choose(self, sequences: Seq[Sequence]) -> StepPlan:
        context = sum(sequence.position for sequence in sequences) // len(sequences)
        room = self._room(sequences)
        self._offered = self._proposer.rows(sequences)
        self._unwanted = self._undrafted(sequences)
        choice = self._policy.choose(self._offered, context, feed=room < 0 and not self._unwanted)
        self._rest = min(choice.rest, max(room, 0))
        return choice

    def _room(self, sequences: Seq[Sequence]) -> int:
        """Plain rounds before which the drafter need not run, however the last one goes."""
        room = HELD - self._most_verified
        return room - max(sequence.held for sequence in sequences)

    def _undrafted(self, sequences: Seq[Sequence]) -> int:
        """What is wanted of a step behind which the drafter does not run: 0 or DROPPED."""
        if not any(sequence.request.drafting for sequence in sequences):
            return DROPPED
        budget = max(sequence.budget for sequence in sequences)
        return 0 if self._policy.holds(budget) else DROPPED

    def _verify(self, sequences: Seq[Sequence], choice: StepPlan) -> StepReport:
        tokens = []
        for sequence, proposal in zip(sequences, choice.chosen, strict=True):
            sequence.drafts = [*proposal.tokens] if proposal else []
            tokens.append([sequence.tokens[-1], *sequence.drafts])
        rows = [
            [len(line), 1, sequence.position, _budget(sequence)]
            for sequence, line in zip(sequences, tokens, strict=True)
        ]
        output, report = self._run(
            sequences, 0, rows, tokens, _parents(choice), choice.draft_tokens or self._unwanted
        )
        self._take(sequences, choice.chosen, output, report)
        return report

    def _run(
        self,
        sequences: Seq[Sequence],
        row: int,
        rows: list[list[int]],
        tokens: list[list[int]],
        parents: Int64,
        wanted: int,
    ) -> tuple[RoundOutput, StepReport]:
        n, width = len(tokens), max(map(len, tokens))
        self._wanted = wanted
        rules, uniforms, history = no_rules(n)
        if any(sequence.rules for sequence in sequences):
            rules = np.array([sequence.rules for sequence in sequences], object)
            if any(sequence.request.rules.need_history for sequence in sequences):
                history = _history(sequences)
        ids, probs = no_candidates(n)
        batch = [self._first_row + row, self._wanted, self._proposer.candidates]
        for source, destination, moved in self._moves:
            batch += [self._first_row + source, self._first_row + destination, moved.position]
        for left in range(self.active, self._used):
            batch += [self._first_row + left, FORGOTTEN, 0]
        self._moves, self._used = [], self.active
        x = VerifyInput(
            batch=np.array(batch),
            rows=np.array(rows),
            tokens=np.array([line + [0] * (width - len(line)) for line in tokens]),
            parents=parents,
            rules=rules,
            uniforms=uniforms,
            history=history,
            candidate_ids=ids,
            candidate_probs=probs,
        )
        start = time.perf_counter()
        output = self._run_round(x)
        self.report = StepReport(
            time.perf_counter() - start,
            output.verify_seconds,
            output.draft_seconds,
        )
        return output, self.report

    def _take(
        self,
        sequences: Seq[Sequence],
        taken: Seq[Proposal | None],
        output: RoundOutput,
        report: StepReport,
    ) -> None:
        """Commit what a step says of its sequences and keep their next drafts."""
        drafts = output.drafts.tolist()
        for i, (accepted, token, _, *path) in enumerate(output.results.tolist()):
            sequence, proposal = sequences[i], taken[i]
            if accepted < 0:
                sequence.finish_reason = "error"
                self._release(sequence)
                continue
            first = not sequence.tokens
            kept = sequence.drafts[:accepted]
            if path:
                kept = [sequence.drafts[node - 1] for node in path[:accepted]]
            committed = sequence.commit([*kept, token])
            source = SOURCES.index(proposal.source) if proposal else 0
            sequence.sources += [*[source] * len(kept), 0][:committed]
            if sequence.request.sampling.logprobs is not None:
                asked = 1 + sequence.request.sampling.logprobs
                sequence.logprobs += output.logprobs[i, :committed, :asked].tolist()
                sequence.logprob_ids += output.logprob_ids[i, :committed, :asked].tolist()
            if not first:
                sequence.verified(accepted + 1, self._wanted)
                sequence.drafted += len(sequence.drafts)
                sequence.accepted += min(accepted, committed)
                sequence.committed_per_round.append(committed)
                report.sequences.append((len(sequence.drafts), _deepest(proposal), accepted))
                report.choices.append(proposal.kind if proposal else "plain")
                if proposal is not None:
                    self._policy.observe(proposal, accepted)
            if sequence.finish_reason is not None:
                self._release(sequence)
                continue
            # the target adds a token of its own
            count = max(0, min(_budget(sequence) - 1, self._wanted))
            sequence.drafts = drafts[i][:count]
            if NO_DRAFT in sequence.drafts:
                count = sequence.drafts.index(NO_DRAFT)
                del sequence.drafts[count:]
            sequence.candidates = None
            if count:
                ids, probs = output.next_candidate_ids[i], output.next_candidate_probs[i]
                sequence.candidates = ids[:count], probs[:count]

    def _release(self, sequence: Sequence) -> None:
        """Free a row: the last decoding sequence moves into it, the prefilling one moves up."""
        index, last = self._decoding.index(sequence), len(self._decoding) - 1
        moved = self._decoding.pop()
        if index != last:
            self._decoding[index] = moved
            self._moves.append((last, index, moved))
        if self._prefilling is not None and self._prefilling.position:
            self._moves.append((last + 1, last, self._prefilling))


def check_request(request: Request, max_seq_len: int) -> None:
    """RequestError for a request that an engine of this length can never run."""
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


def _budget(sequence: Sequence) -> int:
    """Tokens still wanted, as rounds are told: behind the last one there are no drafts."""
    return min(sequence.budget, 1) if sequence.lost else sequence.budget


def _history(sequences: Seq[Sequence]) -> Int64:
    """`[n, L]`: the tokens in the caches, for rows whose rules look at them."""
    lines = [
        [*s.request.prompt, *s.tokens][: s.position] if s.request.rules.need_history else []
        for s in sequences
    ]
    longest = max(1, *map(len, lines))
    return np.array([line + [NO_HISTORY] * (longest - len(line)) for line in lines])


def _parents(choice: StepPlan) -> Int64:
    """Of the tokens to verify; see `VerifyInput`."""
    if all(proposal is None or proposal.is_chain for proposal in choice.chosen):
        return chains(len(choice.chosen))
    parents = np.zeros((len(choice.chosen), 1 + choice.width), np.int64)
    for line, proposal in zip(parents, choice.chosen, strict=True):
        if proposal is not None:
            line[1 : 1 + len(proposal.parents)] = proposal.parents
    return parents


def _deepest(proposal: Proposal | None) -> int:
    return max(depths(tuple(proposal.parents))) if proposal else 0
