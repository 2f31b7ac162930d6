"""Prefixes that are kept change no text: what is reused is what would have been computed.

Chats whose turns send all of the text back, greedy and sampled, of several tenants, with drafts of
all kinds; and what is never shared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import exact
import numpy as np
import pytest
from conftest import BuildPair
from exact import run_all
from guesses import COSTS, AtRandom
from test_adaptive import MAX_SEQ_LEN, Case, case_for, pair_of

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import Request, SamplingParams, Scheduler, Sequence
from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache
from dflash_trt.decoding.speculation import Adaptive, Fixed, Policy, strategy
from dflash_trt.engines.onnxruntime import Engine

PAIRS = ("qwen3", "llama", "windows", "dflash2")
SYSTEM = np.random.default_rng(5).integers(300, size=5 * BLOCK + 3).tolist()
SIZES = (0, 7, 10**4)  # blocks: none, too few for one chat, all
DRAWN = SamplingParams(0.8, seed=3)
scheduler_of = partial(exact.scheduler_of, max_seq_len=MAX_SEQ_LEN)


@pytest.fixture(autouse=True)
def made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adaptive, "timed", lambda *_: None)


@pytest.fixture(scope="module")
def case_of(built_pair: BuildPair, tmp_path_factory: pytest.TempPathFactory) -> object:
    cases: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in cases:
            cases[name] = case_for(pair_of(name, built_pair, tmp_path_factory))
        return cases[name]

    return get


CaseOf = Callable[[str], Case]


def chat(
    scheduler: Scheduler, turns: int, sampling: SamplingParams, said: int = 9, **options: object
) -> list[Sequence]:
    """Each turn sends all of the text back, and something new."""
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


# --- texts and tau --------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_chat_says_the_same_in_the_same_rounds(
    name: str, sampling: SamplingParams, case_of: CaseOf
) -> None:
    case = case_of(name)
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["fixed", "adaptive", "random"])
@pytest.mark.parametrize("name", PAIRS)
def test_many_at_once_say_what_they_say_alone(
    name: str, kind: str, size: int, case_of: CaseOf
) -> None:
    case, cache = case_of(name), PrefixCache(size)
    policy, proposer = fixed(case), None
    if kind == "adaptive":
        info = Engine(case.built.target_engine).info
        policy, proposer = strategy(Speculation(draft_tokens=None), info, COSTS["by turns"])
    elif kind == "random":
        policy = AtRandom(3, 1, 0.05)
    scheduler = scheduler_of(
        case.rounds, policy, proposer, slots=3, prefill_chunk=21, prefix_cache=cache
    )
    for _ in range(3):
        sequences = run_all(scheduler, case.requests)
        assert [x.tokens for x in sequences] == case.texts
    assert len(cache) <= size
    assert any(x.cached_tokens for x in sequences) == (size > 0)
