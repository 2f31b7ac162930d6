"""Kept states of a hybrid: found by exact tokens and salt, under one limit with their blocks."""

import numpy as np

from dflash_trt.decoding.feature_buffer import FeatureBuffer
from dflash_trt.decoding.messages import Copy, Features, Round, RoundSequence
from dflash_trt.decoding.prefix_cache import BLOCK
from dflash_trt.decoding.state_cache import OPENING, State, StateCache
from dflash_trt.engines import FIRST_BLOCK, FIRST_STATE
from tests.support.scheduler_model import WORDS

TEXT = [*WORDS[0], *WORDS[1], 9, 8, 7]  # two blocks and three tokens
END = len(TEXT)


def position(
    cache: StateCache, prompt: list[int], salt: str = "", *, for_drafts: bool = True
) -> int:
    """Return the length of what is found; the state has to come last, and nothing else be one."""
    found = cache.find(salt, prompt, for_drafts=for_drafts)
    assert [isinstance(block, State) for block in found] == [False] * (len(found) - 1) + [True] * (
        len(found) > 0
    )
    return sum(len(block.tokens) for block in found)


def test_a_state_is_found_after_exactly_its_tokens() -> None:
    cache = StateCache(20, 3)
    dropped, stored = cache.insert_state("", TEXT, END, in_sync=True)
    numbers = [(FIRST_BLOCK, 0), (FIRST_BLOCK + 1, BLOCK), (FIRST_STATE, 2 * BLOCK)]
    assert (dropped, stored) == ([], numbers)
    assert cache.used == 2 + 3
    assert position(cache, [*TEXT, 1]) == END
    assert position(cache, TEXT) == 0  # the last token's logits are needed
    assert position(cache, [*TEXT[:-1], 6, 1]) == 0  # a state is never cut
    assert position(cache, [*TEXT, 1], "tenant") == 0
    assert cache.insert_state("", TEXT, END, in_sync=True) == ([], [])


def test_the_longest_text_with_a_state_is_found() -> None:
    cache = StateCache(40, 3)
    for end in (5, BLOCK, BLOCK + 5, END):
        cache.insert_state("", TEXT[:end], end, in_sync=True)
    found = [position(cache, [*TEXT[:end], 99]) for end in (4, 5, 15, 16, 20, 21, 34, 35)]
    assert found == [0, 5, 5, 16, 16, 21, 21, 35]


def test_a_state_less_than_a_block_long_belongs_to_its_salt() -> None:
    cache = StateCache(40, 3)
    cache.insert_state("one", TEXT[:5], 5, in_sync=True)
    assert position(cache, [*TEXT[:5], 1], "one") == 5
    assert position(cache, [*TEXT[:5], 1], "two") == position(cache, [*TEXT[:5], 1]) == 0


def test_what_the_drafter_cannot_go_on_from_is_replaced_once_it_can() -> None:
    cache = StateCache(40, 3)
    cache.insert_state("", TEXT, 0, in_sync=False)
    assert position(cache, [*TEXT, 1]) == 0
    assert position(cache, [*TEXT, 1], for_drafts=False) == END
    dropped, stored = cache.insert_state("", TEXT, END - 1, in_sync=True)
    assert dropped == [FIRST_STATE]
    # the drafter's rows of both blocks too
    assert stored == [(FIRST_BLOCK, 0), (FIRST_BLOCK + 1, BLOCK), (FIRST_STATE + 1, 2 * BLOCK)]
    assert position(cache, [*TEXT, 1]) == END
    assert cache.insert_state("", TEXT, 0, in_sync=False) == ([], [])


def test_features_that_wait_count() -> None:
    """Four of them take as much as a block."""
    cache = StateCache(40, 3, features_per_block=4)
    cache.insert_state("", TEXT, END - 9, in_sync=True)
    assert cache.used == 2 + 3 + 3
    (*_, state) = cache.find("", [*TEXT, 1], for_drafts=True)
    assert isinstance(state, State)
    assert state.buffered == 9


def test_states_go_before_the_blocks_that_lead_to_them() -> None:
    cache = StateCache(8, 3)
    cache.insert_state("", TEXT, END, in_sync=True)  # 2 + 3
    dropped, _ = cache.insert_state("", WORDS[2], BLOCK, in_sync=True)  # 1 + 3
    assert dropped == [FIRST_STATE]
    assert cache.used == 2 + 1 + 3
    assert (position(cache, [*TEXT, 1]), position(cache, [*WORDS[2], 1])) == (0, BLOCK)


def test_what_cannot_fit_is_not_begun() -> None:
    cache = StateCache(4, 3)
    assert cache.insert_state("", TEXT, END, in_sync=True) == ([], [])
    assert cache.used == len(cache) == 0
    cache.insert_state("", TEXT[:20], 20, in_sync=True)
    assert cache.used == 4
    cache = StateCache(40, 3)
    assert cache.insert_state("", [], 0, in_sync=True) == ([], [])


def test_a_prompt_stops_before_the_opening_of_the_answer() -> None:
    cache = StateCache(40, 3)
    prompt = [*TEXT, *range(100, 140)]
    assert cache.chunk_ends("", prompt, 0) == [len(prompt) - OPENING]
    assert cache.chunk_ends("", prompt[:OPENING], 0) == []
    assert cache.chunk_ends("", prompt, len(prompt) - OPENING) == []


def test_a_prompt_stops_where_it_leaves_what_is_known() -> None:
    cache = StateCache(40, 3)
    cache.insert_state("", TEXT, END, in_sync=True)
    prompt = [*TEXT[: 2 * BLOCK], *range(100, 140)]
    assert cache.chunk_ends("", prompt, 0) == [2 * BLOCK, len(prompt) - OPENING]
    assert cache.chunk_ends("other", prompt, 0) == [len(prompt) - OPENING]
    cache.insert_state("", prompt[: 2 * BLOCK], 2 * BLOCK, in_sync=True)
    start = position(cache, prompt)
    assert start == 2 * BLOCK
    assert cache.chunk_ends("", prompt, start) == [len(prompt) - OPENING]


def test_features_are_kept_and_loaded_with_a_state() -> None:
    """Those after the state, of drafts that its last round accepted, are not."""
    buffer, n = FeatureBuffer(), 0

    def pass_on(
        place: int, accepted: int, fate: Features, *copies: Copy
    ) -> tuple[list[float], int]:
        nonlocal n
        tokens = 1 + accepted
        features = np.arange(n, n + tokens, dtype=np.float32)[None, :, None]
        n += tokens
        round = Round(0, [RoundSequence([1] * tokens, 1, place, 99)], fate, 3, copies=copies)
        passed = buffer.pass_on(round, [accepted], features)
        (count,) = passed.before
        if passed.features is None:
            return [], count
        return passed.features[0, : count + tokens, 0].tolist(), count

    pass_on(0, 0, Features.KEEP)  # 0
    # 1, then 2 .. 4 of drafts, which the state does not hold
    pass_on(1, 3, Features.KEEP)
    pass_on(5, 0, Features.DRAFT, Copy(0, FIRST_STATE, 2, 0))
    load = Copy(FIRST_STATE, 0, 2, 0)
    assert pass_on(2, 1, Features.DRAFT, load) == ([0.0, 1.0, 6.0, 7.0], 2)
    assert pass_on(2, 0, Features.DRAFT, load) == ([0.0, 1.0, 8.0], 2)  # it can be loaded again
    pass_on(3, 0, Features.DROP)
    pass_on(4, 0, Features.KEEP, Copy(FIRST_STATE, None, 0, 0))
    assert pass_on(2, 0, Features.DRAFT, load) == ([11.0], 0)


def test_features_of_a_round_in_which_all_texts_end_wait() -> None:
    """The drafter does not run then; who goes on from the text's end needs them."""
    buffer = FeatureBuffer()
    features = np.arange(3, dtype=np.float32)[None, :, None]

    def round_of(row: RoundSequence, *copies: Copy) -> Round:
        return Round(0, [row], Features.DRAFT, 7, copies=copies)

    ends = round_of(RoundSequence([1, 2, 3], 1, 4, budget=3))
    passed = buffer.pass_on(ends, [2], features)
    assert (passed.features, passed.before, passed.buffered) == (None, [0], [3])
    more = round_of(RoundSequence([1], 1, 0, budget=9), Copy(0, FIRST_STATE, 5, 0))
    buffer.pass_on(more, [0], features[:, :1])
    load = round_of(RoundSequence([1], 1, 5, budget=9), Copy(FIRST_STATE, 0, 5, 0))
    passed = buffer.pass_on(load, [0], features[:, :1] + 9)
    assert passed.features is not None
    assert (passed.before, passed.features[0, :2, 0].tolist()) == ([1], [0.0, 9.0])
    assert passed.buffered == [0]


def test_a_round_says_how_many_features_wait() -> None:
    """Of all rounds since the drafter ran, rejected drafts not among them."""
    buffer = FeatureBuffer()
    features = np.zeros((2, 3, 1), np.float32)

    def waiting(fate: Features, *places: int) -> list[int | None]:
        rows = [RoundSequence([1, 2, 3], 1, place, 99) for place in places]
        return buffer.pass_on(Round(0, rows, fate, 3), [2, 0], features).buffered

    assert waiting(Features.KEEP, 4, 9) == [3, 1]
    assert waiting(Features.KEEP, 7, 10) == [6, 2]
    assert waiting(Features.DRAFT, 10, 11) == [0, 0]
    assert waiting(Features.KEEP, 13, 12) == [3, 1]
    assert waiting(Features.DROP, 16, 13) == [None, None]
