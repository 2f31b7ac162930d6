"""Continuous batching: sequences join and leave between rounds; active rows stay dense."""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from dflash_trt.decoding.draft_length import DraftLength
from dflash_trt.decoding.rounds import RoundOutput, RunRound, VerifyInput, no_candidates
from dflash_trt.decoding.sequence import Request, Sequence
from dflash_trt.errors import RequestError


class Scheduler:
    """Runs one prompt chunk or one round at a time; to be used by a single thread.

    Sequences that decode hold the cache rows 0 .. n-1; the one being prefilled holds row n.
    """

    def __init__(
        self,
        run_round: RunRound,
        *,
        slots: int,
        max_seq_len: int,
        prefill_chunk: int,
        draft_length: DraftLength,
        max_queue: int,
    ) -> None:
        self._run_round = run_round
        self._slots = slots
        self._max_seq_len = max_seq_len
        self._prefill_chunk = prefill_chunk
        self._draft_length = draft_length
        self._max_queue = max_queue
        self._waiting: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._prefilling: Sequence | None = None
        self._moves: list[tuple[int, int]] = []
        self._prefilled_last = False
        self._draft_tokens = 0  # asked for in the last step

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._decoding or self._prefilling)

    @property
    def waiting(self) -> int:
        """Requests that hold no row yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> Sequence:
        """Queue a request; RequestError when it can never run or the queue is full."""
        if not request.prompt:
            raise RequestError("The prompt is empty", "Send at least one token of text.")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}", "Ask for at least 1.")
        total = len(request.prompt) + request.max_tokens
        if total > self._max_seq_len:
            raise RequestError(
                f"The prompt has {len(request.prompt)} tokens and {request.max_tokens} more are "
                f"asked for: {total} exceed the engine's {self._max_seq_len}",
                "Shorten the prompt, lower max_tokens, or build with a larger serving.max_seq_len.",
            )
        if len(self._waiting) >= self._max_queue:
            raise RequestError(
                f"{self._max_queue} requests are waiting already",
                "Try again later, or build with a larger serving.max_queue.",
            )
        sequence = Sequence(request)
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now and free its row; one that has ended stays as it is."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = "cancelled"
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence is self._prefilling:
            self._prefilling = None
        else:
            self._release(sequence)

    def step(self) -> list[Sequence]:
        """Run one prompt chunk or one round; returns the sequences with news."""
        if self._prefilling is None and self._waiting and len(self._decoding) < self._slots:
            self._prefilling = self._waiting.popleft()
        # chunks and rounds take turns: a long prompt holds the others up by one chunk at a time
        if self._prefilling is not None and not (self._prefilled_last and self._decoding):
            self._prefilled_last = True
            return self._prefill(self._prefilling)
        self._prefilled_last = False
        return self._round() if self._decoding else []

    def _prefill(self, sequence: Sequence) -> list[Sequence]:
        prompt = sequence.request.prompt
        chunk = prompt[sequence.position : sequence.position + self._prefill_chunk]
        last = sequence.position + len(chunk) == len(prompt)
        output = self._run(
            [sequence],
            row=len(self._decoding),
            tokens=[list(chunk)],
            forced=len(chunk),
            budget=sequence.budget if last else 0,
        )
        sequence.position += len(chunk)
        if not last:
            return []
        self._prefilling = None
        self._decoding.append(sequence)
        sequence.commit([int(output.next_tokens[0])])
        self._take_drafts(sequence, output, 0)
        return [sequence]

    def _round(self) -> list[Sequence]:
        sequences = list(self._decoding)
        tokens = [[sequence.tokens[-1], *sequence.drafts] for sequence in sequences]
        output = self._run(sequences, row=0, tokens=tokens, forced=1, budget=None)
        for i, sequence in enumerate(sequences):
            accepted = int(output.accepted[i])
            taken = sequence.commit([*sequence.drafts[:accepted], int(output.next_tokens[i])])
            sequence.position += accepted + 1
            sequence.drafted += len(sequence.drafts)
            sequence.accepted += min(accepted, taken)
            sequence.committed_per_round.append(taken)
            if sequence.drafts:
                self._draft_length.observe(len(sequence.drafts), accepted)
            self._take_drafts(sequence, output, i)
        return sequences

    def _run(
        self,
        sequences: Seq[Sequence],
        *,
        row: int,
        tokens: list[list[int]],
        forced: int,
        budget: int | None,
    ) -> RoundOutput:
        n, width = len(tokens), max(map(len, tokens))
        padded = np.zeros((n, width), np.int64)
        for i, line in enumerate(tokens):
            padded[i, : len(line)] = line
        ids, probs = no_candidates(n, max(1, width - forced))
        for i, sequence in enumerate(sequences):
            if sequence.candidate_ids is not None and sequence.candidate_probs is not None:
                ids[i, : len(sequence.candidate_ids)] = sequence.candidate_ids
                probs[i, : len(sequence.candidate_ids)] = sequence.candidate_probs
        settings = [sequence.request.sampling for sequence in sequences]
        moves = self._moves or [(-1, -1)]
        self._moves = []
        # sampled text depends on where rounds begin: a fixed length lets a seed repeat it
        fixed = any(s.temperature for s in settings)
        self._draft_tokens = self._draft_length.longest if fixed else self._draft_length.choose(n)
        return self._run_round(
            VerifyInput(
                row=np.array([row]),
                moves=np.array(moves),
                tokens=padded,
                lengths=np.array([len(line) for line in tokens]),
                forced=np.array([forced] * n),
                positions=np.array([sequence.position for sequence in sequences]),
                budget=np.array(
                    [s.budget for s in sequences] if budget is None else [budget], np.int64
                ),
                draft_tokens=np.array([self._draft_tokens]),
                sampling=np.array(
                    [(s.temperature, s.top_k, s.top_p) for s in settings], np.float32
                ),
                seeds=np.array([s.seed for s in settings]),
                candidate_ids=ids,
                candidate_probs=probs,
            )
        )

    def _take_drafts(self, sequence: Sequence, output: RoundOutput, i: int) -> None:
        """Keep a row's next drafts, or give the row up when the sequence has ended."""
        if sequence.finish_reason is not None:
            self._release(sequence)
            return
        count = min(sequence.budget, self._draft_tokens)
        sequence.drafts = output.drafts[i, :count].tolist()
        greedy = sequence.request.sampling.temperature == 0
        sequence.candidate_ids = None if greedy else output.next_candidate_ids[i, :count]
        sequence.candidate_probs = None if greedy else output.next_candidate_probs[i, :count]

    def _release(self, sequence: Sequence) -> None:
        """Free a row: the last decoding sequence moves into it, the prefilling one moves up."""
        index, last = self._decoding.index(sequence), len(self._decoding) - 1
        moved = self._decoding.pop()
        if index != last:
            self._decoding[index] = moved
            self._moves.append((last, index))
        if self._prefilling is not None and self._prefilling.position:
            self._moves.append((last + 1, last))
