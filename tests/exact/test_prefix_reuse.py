"""Prefixes that are kept change no text: what is reused is what would have been computed.

Chats whose turns send all of the text back, greedy and sampled, of several tenants, with drafts of
all kinds; and what is never shared.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dflash_trt.decoding import Request, SamplingParams, Scheduler, SequenceState
from dflash_trt.decoding.feature_buffer import FeatureBuffer
from dflash_trt.decoding.messages import Copy, Features, Round, RoundSequence
from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache
from dflash_trt.engines import FIRST_BLOCK
from dflash_trt.speculation import Fixed, Policy
from tests.exact.test_adaptive import MAX_SEQ_LEN, OTHERS, Case, CaseOf
from tests.support import equality as exact
from tests.support.equality import run_all

SYSTEM = np.random.default_rng(5).integers(300, size=5 * BLOCK + 3).tolist()
DRAWN = SamplingParams(0.8, seed=3)
scheduler_of = partial(exact.scheduler_of, max_seq_len=MAX_SEQ_LEN)


pytestmark = pytest.mark.usefixtures("made_up_time")


def chat(
    scheduler: Scheduler, turns: int, sampling: SamplingParams, said: int = 9, **options: object
) -> list[SequenceState]:
    text, dice, answers = [*SYSTEM], np.random.default_rng(said), []
    for turn in range(turns):
        text += dice.integers(300, size=said + turn).tolist()
        request = Request(text, 11, sampling, **options)  # type: ignore[arg-type]
        (answer,) = run_all(scheduler, [request])
        answers.append(answer)
        text = [*text, *answer.tokens]
    return answers


def fixed(case: Case) -> Policy:
    return Fixed(case.built.drafter.spec.block_size - 1)


@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["qwen3", *OTHERS])
def test_a_chat_says_the_same_in_the_same_rounds(
    name: str, sampling: SamplingParams, long_case_of: CaseOf
) -> None:
    case = long_case_of(name)
    for chunk in (5, BLOCK, MAX_SEQ_LEN):
        start = partial(scheduler_of, case.rounds, fixed(case), prefill_chunk=chunk)
        off, on = (
            chat(start(prefix_cache=cache), 5, sampling) for cache in (None, PrefixCache(10**4))
        )
        assert [x.tokens for x in on] == [x.tokens for x in off]
        assert [x.committed_per_round for x in on] == [x.committed_per_round for x in off]
        assert not any(x.cached_tokens for x in off)
        before = 0
        for answer in on:
            prompt = len(answer.request.prompt)
            # of the text so far all that the drafter has seen: not the last round's
            assert before - 2 * BLOCK < answer.cached_tokens <= min(before, prompt - 1)
            before = prompt + len(answer.tokens)


def test_choices_of_one_prompt_prefill_it_once(long_case_of: CaseOf) -> None:
    case = long_case_of("qwen3")
    scheduler = scheduler_of(case.rounds, fixed(case), slots=4, prefix_cache=PrefixCache(99))
    requests = [Request(SYSTEM, 5, replace(DRAWN, seed=i)) for i in range(8)]
    first, *others = run_all(scheduler, requests)
    assert first.cached_tokens == 0
    assert {x.cached_tokens for x in others} == {len(SYSTEM) // BLOCK * BLOCK}


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed(long_case_of: CaseOf) -> None:
    case = long_case_of("qwen3")
    scheduler = scheduler_of(case.rounds, fixed(case), prefix_cache=PrefixCache(99))
    scored = SamplingParams(prompt_logprobs=True, logprobs=1)
    first, again = (run_all(scheduler, [Request(SYSTEM, 3, scored)])[0] for _ in range(2))
    assert again.cached_tokens == 0
    assert again.logprobs == first.logprobs
    (after,) = run_all(scheduler, [Request(SYSTEM, 3)])
    assert after.cached_tokens == len(SYSTEM) // BLOCK * BLOCK


def test_what_the_drafter_has_not_seen_is_for_those_who_draft_nothing(long_case_of: CaseOf) -> None:
    case = long_case_of("qwen3")
    scheduler = scheduler_of(case.rounds, fixed(case), prefix_cache=PrefixCache(99))
    asked = [Request(SYSTEM, 9, drafting=drafting) for drafting in (False, True, False, True)]
    found = [run_all(scheduler, [request])[0] for request in asked]
    whole = len(SYSTEM) // BLOCK * BLOCK
    assert [x.cached_tokens for x in found] == [0, 0, whole, whole]
    assert found[1].committed_per_round == found[3].committed_per_round
    assert found[1].rounds < found[0].rounds == 8


def test_features_of_a_slots_last_sequence_are_not_the_next_ones() -> None:
    """Caching blocks of a sequence that goes on leaves its features alone."""
    buffer, features = FeatureBuffer(), np.ones((1, BLOCK, 4), np.float32)

    def pass_on(place: int, fate: Features, *copies: Copy) -> list[int]:
        round = Round(0, [RoundSequence([1] * BLOCK, BLOCK, place, 9)], fate, 3, copies=copies)
        return buffer.pass_on(round, [0], features).before

    pass_on(0, Features.KEEP)
    pass_on(BLOCK, Features.KEEP, Copy(0, FIRST_BLOCK, BLOCK, 0))
    assert pass_on(2 * BLOCK, Features.DRAFT) == [2 * BLOCK]
    pass_on(0, Features.KEEP)
    assert pass_on(BLOCK, Features.DRAFT, Copy(FIRST_BLOCK, 0, BLOCK, 0)) == [0]
