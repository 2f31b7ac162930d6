"""Schedulers, slots, waiting queue and prefix cache against a model that knows whole texts alone.

The engine is made up: its rows and blocks hold tokens and whose salt they were written under, they
are copied as the steps say, and the next token depends on all that a row holds. So a row or block
of somebody else's shows at once, in the row or in the text. A hybrid's next token depends on what
its state has taken in, and on nothing that can be written over. The drafter's rows hold what it was
given of the real feature buffer, within the rows that an engine has.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_trt.decoding import (
    Candidates,
    Copy,
    DraftResult,
    FeatureBuffer,
    PrefixCache,
    Proposer,
    Request,
    Round,
    RoundResult,
    RoundSequence,
    Scheduler,
    SequenceResult,
    SequenceState,
    StateCache,
    WaitingQueue,
)
from dflash_trt.decoding.acceptance import accept_greedy
from dflash_trt.decoding.prefix_cache import BLOCK
from dflash_trt.engines import FIRST_BLOCK, FIRST_STATE, drafter_cache_len, most_buffered
from tests.support.random_proposals import AtRandom

SALTS = ("", *(f"salts that begin alike, number {number}" for number in range(2)))
WORDS = [[word] * BLOCK for word in range(3)]  # texts of few words often begin alike
TEXTS = st.builds(
    lambda words, rest: [token for word in words for token in WORDS[word]] + [9] * rest,
    st.lists(st.integers(0, 2), max_size=4),
    st.integers(0, BLOCK - 1),
)
VOCAB, MAX_SEQ_LEN, DRAFTS, MOST = 12, 800, 4, 8
BLOCK_SIZE = 1 + DRAFTS
CLEARED = "", -1  # what a row holds whose logits were not finite
LONG = 10_000  # steps in which everything ends, by far


def next_token(text: list[int]) -> int:
    return hash(tuple(text)) % VOCAB


def text_of(request: Request) -> list[int]:
    return _text_of(tuple(request.prompt), request.max_tokens, request.stop_ids)


@lru_cache(maxsize=256)
def _text_of(prompt: tuple[int, ...], most: int, stop_ids: frozenset[int]) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < most and not stop_ids & {*tokens[-1:]}:
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


class StepFailedError(Exception):
    pass


Written = tuple[str, int]  # salt and token


@dataclass
class MadeUpState:
    folded: list[Written] = field(default_factory=list)
    drafts: list[Written] = field(default_factory=list)  # the last ones, of which some are right

    def fold(self, accepted: int, known: list[Written]) -> None:
        assert accepted <= len(self.drafts), "more than there were"
        self.folded += [*self.drafts[:accepted], *known]
        self.drafts = []

    def copy(self, *, drafts: bool) -> "MadeUpState":
        return MadeUpState([*self.folded], [*self.drafts] if drafts else [])


class MadeUpEngine:
    """A `RunRound` over a scheduler, which is set afterwards."""

    scheduler: Scheduler

    def __init__(self, seed: int, *, hybrid: bool) -> None:
        self._dice = np.random.default_rng(seed)
        self._hybrid = hybrid
        self.memory: dict[int, list[Written]] = {}  # of slots and blocks
        self.states: dict[int, MadeUpState] = {}  # of slots and kept ones
        self.drafter: dict[int, dict[int, Written]] = {}  # by position, of slots and blocks
        self.buffer = FeatureBuffer(most_buffered(BLOCK_SIZE))
        self.fails_after: int | None = None  # so many of the next step's copies
        self.spoils: int | None = None  # which row of the next step has no finite logits

    def __call__(self, round: Round) -> RoundResult:
        first = round.first_slot
        fails, self.fails_after = self.fails_after, None
        for copy in round.copies[:fails]:
            self.perform(copy)
        if fails is not None:
            raise StepFailedError
        holders = dict(enumerate(self.scheduler.sequences))
        for slot, sequence in holders.items():
            self._holds(slot, sequence)
        results = [
            self._verify(row, slot, holders.get(slot))
            for slot, row in enumerate(round.sequences, first)
        ]
        drafts = None
        accepted = [result.accepted for result in results]
        passed = self.buffer.pass_on(round, accepted, self._features(round))
        for result, count in zip(results, passed.buffered, strict=True):
            result.buffered = count
        if passed.features is not None:
            for index, row in enumerate(round.sequences):
                start = row.position - passed.before[index]
                self._inject(first + index, row, start, passed.features[index])
                if row.follows:
                    self._knows(first + index, row.position + row.known + accepted[index])
            drafts = self._drafts(first, len(results), round.draft_tokens)
        if self.spoils is not None:
            spoilt, self.spoils = self.spoils % len(results), None
            written = self.memory[first + spoilt]
            written[:] = [CLEARED] * len(written)
            self.states[first + spoilt] = MadeUpState([CLEARED])
            results[spoilt] = SequenceResult(0, 0, failed=True)
        return RoundResult(results, 0.0, drafts)

    def _features(self, round: Round) -> Any:
        """Return features `[n, S, 2]`: each token's position and the token."""
        features = np.zeros((len(round.sequences), round.width, 2), np.float32)
        for index, row in enumerate(round.sequences):
            for place, token in enumerate(row.tokens):
                features[index, place] = row.position + place, token
        return features

    def _inject(self, slot: int, row: RoundSequence, start: int, features: Any) -> None:
        """Write what the drafter is given from `start` on, and its block."""
        assert start + len(features) + BLOCK_SIZE <= drafter_cache_len(MAX_SEQ_LEN, BLOCK_SIZE)
        taken = self.drafter.setdefault(slot, {})
        salt = self.memory[slot][0][0]
        for place, (position, token) in enumerate(features.tolist(), start):
            taken[place] = (salt, int(token)) if position == place else CLEARED

    def _knows(self, slot: int, end: int) -> None:
        taken = self.drafter[slot]
        text = self.memory[slot][:end]
        assert [taken.get(place) for place in range(end)] == text, "the drafter knows another text"

    def perform(self, copy: Copy) -> None:
        source, to = copy.source, copy.destination
        self._copy_drafter(copy)
        if to is None:
            self.memory.pop(source, None)
            if source >= FIRST_STATE:
                self.states.pop(source, None)
            return
        if self._hybrid and not FIRST_BLOCK <= max(source, to) < FIRST_STATE:
            between_slots = max(source, to) < FIRST_BLOCK
            self.states[to] = self.states[source].copy(drafts=between_slots)
        held, end = self.memory[source], copy.start + copy.tokens
        values = held[: copy.tokens] if source >= FIRST_BLOCK else held[copy.start : end]
        assert len(values) == copy.tokens, "what is copied is not there"
        if to >= FIRST_BLOCK:
            self.memory[to] = values
            return
        row = self.memory.setdefault(to, [])
        assert len(row) >= copy.start, "a hole in a row"
        row[copy.start : end] = values

    def _copy_drafter(self, copy: Copy) -> None:
        taken = self.drafter.get(copy.source, {})
        if copy.destination is None:
            self.drafter.pop(copy.source, None)
            return
        places = range(copy.start, copy.start + copy.tokens)
        copied = {place: taken[place] for place in places if place in taken}
        if copy.destination >= FIRST_BLOCK:
            self.drafter[copy.destination] = copied
        else:
            self.drafter.setdefault(copy.destination, {}).update(copied)

    def _holds(self, slot: int, sequence: SequenceState) -> None:
        request, row = sequence.request, self.memory.get(slot, [])
        text = [*request.prompt, *sequence.tokens][: sequence.position]
        assert row[: len(text)] == [(request.cache_salt, token) for token in text], "another's row"

    def _verify(
        self, given: RoundSequence, slot: int, sequence: SequenceState | None
    ) -> SequenceResult:
        tokens, known = list(given.tokens), given.known
        salt = sequence.request.cache_salt if sequence else ""
        row = self.memory.setdefault(slot, [])
        assert len(row) >= given.position, "a hole in a row"
        row[given.position :] = written = [(salt, token) for token in tokens[:known]]
        text, drafts = [token for _, token in row], tokens[known:]
        if self._hybrid:
            state = MadeUpState() if given.position == 0 else self.states[slot]
            self.states[slot] = state
            state.fold(given.replayed, written)
            state.drafts = [(salt, token) for token in drafts]
            assert state.folded == row, "a state of another text"
            text = [token for _, token in state.folded]
        right = [next_token(text + drafts[:j]) for j in range(len(drafts) + 1)]
        accepted = accept_greedy(drafts, right)
        assert accepted is not None
        row += [(salt, token) for token in drafts[: accepted.drafts]]
        return SequenceResult(accepted.drafts, accepted.token)

    def _drafts(self, first: int, n: int, count: int) -> DraftResult:
        ids = self._dice.permuted(np.tile(np.arange(VOCAB), (n, count, 1)), axis=-1)[..., :3]
        for i in range(n):
            text = [token for _, token in self.memory[first + i]]
            for place in range(count):  # the anchor is not in the row yet
                text.append(next_token(text))
                right = next_token(text)
                if self._dice.random() < 0.7:  # the first one is proposed
                    ids[i, place] = self._dice.permuted(ids[i, place])
                    ids[i, place, self._dice.choice([0, 0, 1, 2])] = right
        probs = np.broadcast_to(np.float32([0.5, 0.3, 0.2]), ids.shape)
        return DraftResult([Candidates(*of_row) for of_row in zip(ids, probs, strict=True)], 0.0)


class SchedulerModel(RuleBasedStateMachine):
    """A scheduler with its queue and cache, as the engine loop runs it."""

    @initialize(
        slots=st.integers(1, 3),
        chunk=st.sampled_from([1, 7, 16, MAX_SEQ_LEN]),
        blocks=st.sampled_from([0, 3, 12, 50]),
        hybrid=st.booleans(),
        dropping=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 2**31),
    )
    def start(
        self, slots: int, chunk: int, blocks: int, hybrid: bool, dropping: float, seed: int
    ) -> None:
        self.slots, self.chunk, self.dropping, self.seed = slots, chunk, dropping, seed
        self.queue = WaitingQueue[SequenceState]()
        self.cache: PrefixCache | None = None
        if blocks:
            self.cache = StateCache(4 * blocks, 3, BLOCK) if hybrid else PrefixCache(blocks)
        self.engine = MadeUpEngine(seed, hybrid=hybrid)
        self._renew()
        self.has_gone_on = False
        self.asked: list[SequenceState] = []
        self.told: list[SequenceState] = []  # the end of these
        self.ended_here: list[SequenceState] = []  # by us, or by a step that failed or spoilt it

    def _renew(self) -> None:
        self.scheduler = self.engine.scheduler = Scheduler(
            self.engine,
            slots=self.slots,
            max_seq_len=MAX_SEQ_LEN,
            prefill_chunk=self.chunk,
            policy=AtRandom(DRAFTS, self.seed, self.dropping),
            proposer=Proposer(MOST, lookup=True),
            queue=self.queue,
            prefix_cache=self.cache,
        )

    @rule(
        text=TEXTS.map(lambda text: text or [0]),
        most=st.integers(1, 20),
        salt=st.sampled_from(SALTS),
        priority=st.integers(-1, 1),
        stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        drafting=st.booleans(),
    )
    def submit(self, text: list[int], most: int, salt: str, drafting: bool, **more: Any) -> None:
        stops = more.pop("stops")
        request = Request(text, most, stop_ids=stops, cache_salt=salt, drafting=drafting, **more)
        self.asked.append(self.scheduler.submit(request))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), more=st.integers(0, 20), most=st.integers(1, 20))
    def go_on(self, data: Any, more: int, most: int) -> None:
        """Submit the next turn of a chat, once the last one has ended in any way."""
        before = self.asked[data.draw(st.integers(0, len(self.asked) - 1))]
        for _ in range(LONG):
            if before.finish_reason is not None:
                break
            self._step()
        prompt = [*before.request.prompt, *before.tokens, *[9] * more][: MAX_SEQ_LEN - most]
        salt = before.request.cache_salt
        self.asked.append(self.scheduler.submit(Request(prompt, most, cache_salt=salt)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        scheduler, waited = self.scheduler, self._waiting()
        try:
            advanced = scheduler.step()
        except StepFailedError:  # as the engine loop does
            for sequence in scheduler.sequences:
                sequence.finish_reason = "error"
                self.ended_here.append(sequence)
            scheduler.forget()
            self._renew()
            return
        finally:
            self._took_the_next(waited)
        ended = [sequence for sequence in advanced if sequence.finish_reason is not None]
        self.told += [sequence for sequence in ended if sequence.finish_reason != "error"]
        self.ended_here += [sequence for sequence in ended if sequence.finish_reason == "error"]

    def _waiting(self) -> list[SequenceState]:
        """Return those without a slot, the next one first."""
        left = {id(entry[2]) for entry in self.queue._heap}
        found = [each for each in self.asked if id(each) in left]
        return sorted(found, key=lambda each: each.request.priority)

    def _took_the_next(self, waited: list[SequenceState]) -> None:
        left = {id(each) for each in self._waiting()}
        taken = [each for each in waited if id(each) not in left]
        assert taken == waited[: len(taken)], "another one's turn"

    @rule(copies=st.integers(0, 3))
    def fail_next(self, copies: int) -> None:
        self.engine.fails_after = copies

    @rule(row=st.integers(0, 2))
    def spoil_next(self, row: int) -> None:
        self.engine.spoils = row

    @precondition(lambda self: any(each.finish_reason is None for each in self.asked))
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "expired"]))
    def end(self, data: Any, reason: str) -> None:
        live = [each for each in self.asked if each.finish_reason is None]
        sequence = live[data.draw(st.integers(0, len(live) - 1))]
        self.scheduler.finish(sequence, reason)
        self.scheduler.finish(sequence, "again")  # it stays as it is
        assert sequence.finish_reason == reason
        self.ended_here.append(sequence)

    @precondition(lambda self: not self.has_gone_on)  # once: it takes hundreds of steps
    @rule(steps=st.integers(400, 600))
    def go_on_beside_a_new_text(self, steps: int) -> None:
        """Let long texts that lost their drafter run beside one that drafts."""
        self.has_gone_on = True
        self.submit([1], 600, SALTS[0], drafting=True, priority=0, stops=frozenset())
        self.step(2)
        self.swap_drafter()
        self.submit([2], 600, SALTS[0], drafting=True, priority=0, stops=frozenset())
        self.step(steps)

    @rule()
    def swap_drafter(self) -> None:
        for sequence in self.scheduler.sequences:
            sequence.lose_drafter()
        if self.cache is not None:
            self.cache.clear()

    @invariant()
    def each_is_in_one_place(self) -> None:
        places = [*self.scheduler.sequences, *self._waiting()]
        live = [each for each in self.asked if each.finish_reason is None]
        assert sorted(map(id, places)) == sorted(map(id, live))
        assert self.scheduler.active <= self.slots

    @invariant()
    def buffers_are_bounded(self) -> None:
        for sequence in self.scheduler.sequences:
            assert sequence.buffered <= most_buffered(BLOCK_SIZE)
            assert not (sequence.out_of_sync and sequence.buffered)
        held = [parts.tokens for parts in self.engine.buffer._parts.values()]
        assert max(held, default=0) <= most_buffered(BLOCK_SIZE)

    @invariant()
    def texts_are_right(self) -> None:
        for each in self.asked:
            assert each.tokens == text_of(each.request)[: len(each.tokens)]

    def teardown(self) -> None:
        """Check that nothing is lost: everything ends, is reported once, and leaves nothing."""
        self.engine.fails_after = self.engine.spoils = None
        for _ in range(LONG):
            if not self.scheduler.has_work:
                break
            self._step()
        assert sorted(map(id, [*self.told, *self.ended_here])) == sorted(map(id, self.asked))
        for each in self.told:
            assert each.tokens == text_of(each.request)
            stopped = each.tokens[-1] in each.request.stop_ids
            assert each.finish_reason == ("stop" if stopped else "length")
        assert not self.scheduler.kv_entries
        if self.cache is not None:
            # what the next step would do
            for copy in self.scheduler._slots.take_copies():
                self.engine.perform(copy)
            dropped, _ = self.cache.insert("", [], 0)
            kept = {number for number in self.engine.memory if number >= FIRST_BLOCK}
            assert len(kept - {*dropped}) == len(self.cache), "a block that nobody knows of"
