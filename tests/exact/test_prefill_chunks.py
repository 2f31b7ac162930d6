"""Prompts beside sequences that decode: their chunks are about as large as a round."""

import pytest

from dflash_trt.decoding import Request, Round, RoundResult, RunRound, Scheduler, scheduler
from dflash_trt.speculation import Fixed
from tests.support.built_pairs import MAX_SEQ_LEN, BuildPair
from tests.support.equality import one_by_one, rounds_of

LEAST, PROMPT, NEW_TOKENS = 16, 100, 40


class Watched:
    def __init__(self, rounds: RunRound) -> None:
        self._rounds = rounds
        self.chunks: list[int] = []

    def __call__(self, round: Round) -> RoundResult:
        sequence = round.sequences[0]
        self.chunks += [len(sequence.tokens)] if sequence.known > 1 else []
        return self._rounds(round)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CHUNK_BESIDE_ROUNDS", LEAST)


def scheduler_of(rounds: RunRound) -> Scheduler:
    sizes = {"slots": 4, "max_seq_len": MAX_SEQ_LEN, "prefill_chunk": 90}
    return Scheduler(rounds, **sizes, policy=Fixed(7))


def test_chunks_are_as_large_as_a_round(built_pair: BuildPair) -> None:
    built = built_pair(taught=False)  # whose texts take many rounds
    prompts = [(2 * text)[:PROMPT] for text in built.texts[:4]]
    watched, sequences = Watched(rounds_of(built)), []
    decoder = scheduler_of(watched)
    for prompt in prompts:  # each comes when the one before it decodes
        sequences.append(decoder.submit(Request(prompt, NEW_TOKENS)))
        while not sequences[-1].tokens:
            decoder.step()
    while decoder.has_work:
        decoder.step()
    alone, one, two, three = [90, 10], [15, 15, *[14] * 5], [15, 15, *[14] * 5], [20] * 5
    assert watched.chunks == alone + one + two + three  # a round verifies 8 tokens of each
    expected = one_by_one(scheduler_of(rounds_of(built)), prompts)
    assert [each.tokens for each in sequences] == [each.tokens for each in expected]
