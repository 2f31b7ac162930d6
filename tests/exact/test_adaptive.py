"""Rounds over texts longer than features are held back: what the drafter says, and when it rests.

That any text is the target's is in test_lossless.py.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Request,
    RunRound,
    SamplingParams,
    Scheduler,
    SequenceState,
    in_process,
    strategy,
)
from dflash_trt.engines.info import read_info
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Choice, Fixed, NextStep
from tests.support import equality as exact
from tests.support import families, reference
from tests.support.built_pairs import BuildPair, BuiltPair, built_from
from tests.support.equality import run_all
from tests.support.random_proposals import COSTS, AtRandom, Guesses

MAX_SEQ_LEN = 400  # longer than features are held back
NEW_TOKENS = 48
DRAWN = (
    SamplingParams(0.8, seed=3),
    SamplingParams(1.0, top_k=20, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2, seed=4),
    SamplingParams(0.6, min_p=0.05, min_tokens=9, logprobs=2, seed=2**62),
)
OTHERS = [pytest.param(name, marks=pytest.mark.models) for name in ("windows", "llama", "dflash2")]
scheduler_of = partial(exact.scheduler_of, max_seq_len=MAX_SEQ_LEN)


@dataclass(frozen=True)
class Case:
    built: BuiltPair
    rounds: RunRound
    requests: list[Request]
    texts: list[list[int]]


pytestmark = pytest.mark.usefixtures("made_up_time")


CaseOf = Callable[[str], Case]


def pair_of(name: str, built_pair: BuildPair, paths: pytest.TempPathFactory) -> BuiltPair:
    if name in ("qwen3", "llama"):
        return built_pair(max_seq_len=MAX_SEQ_LEN, family=name, taps=(1, 2), vocab=300)
    directory = paths.mktemp(name)
    pair = families.make("mistral" if name == "windows" else name, directory)
    return built_from(pair, directory, max_seq_len=MAX_SEQ_LEN)


def case_for(built: BuiltPair) -> Case:
    target, drafter = Engine(built.target_engine), Engine(built.drafter_engine)
    prompts = [text[: 14 + 9 * i] for i, text in enumerate(built.texts)]
    counts = [NEW_TOKENS, 7, NEW_TOKENS, 1, 30, 2, 23, NEW_TOKENS]
    requests = [
        Request(prompt, count, sampling)
        for prompt, count, drawn in zip(prompts, counts, itertools.cycle(DRAWN), strict=False)
        for sampling in (SamplingParams(), drawn)
    ]
    texts = [s.tokens for s in run_all(scheduler_of(in_process(target, None), Fixed(0)), requests)]
    of_transformers = reference.greedy(built.pair.target_dir, prompts, NEW_TOKENS)
    assert texts[::2] == [t[:count] for t, count in zip(of_transformers, counts, strict=True)]
    return Case(built, in_process(target, drafter), requests, texts)


def decode(scheduler: Scheduler, case: Case) -> None:
    sequences: list[SequenceState] = []
    waiting = list(case.requests)
    for turn in itertools.count():
        if waiting and turn % 5 == 0:
            sequences.append(scheduler.submit(waiting.pop(0)))
        scheduler.step()
        if not (waiting or scheduler.has_work):
            break
    assert [sequence.tokens for sequence in sequences] == case.texts


class EveryToken(AtRandom):
    """A policy that verifies nothing and runs the drafter after every token."""

    def choose(self, step: NextStep) -> Choice:
        return Choice([None] * len(step.sequences), self.draft_tokens)


def guesses_of(case: Case, seed: int) -> Guesses:
    texts = {id(r): text for r, text in zip(case.requests, case.texts, strict=True)}
    return Guesses(texts, read_info(case.built.target_engine), seed)


def filled(case: Case) -> Case:
    """Add three requests that fill the cache to its end, one by its prompt."""
    prompts = case.built.texts[:3]
    prompts[2] = [token for text in case.built.texts[2:6] for token in text]
    longest = [
        Request(prompt, MAX_SEQ_LEN - len(prompt), sampling)
        for prompt, sampling in zip(prompts, (SamplingParams(), *DRAWN), strict=False)
    ]
    plain = scheduler_of(in_process(Engine(case.built.target_engine), None), Fixed(0))
    texts = [s.tokens for s in run_all(plain, longest)]
    return replace(case, requests=[*longest, *case.requests], texts=[*texts, *case.texts])


@pytest.mark.models
@pytest.mark.parametrize("name", ["qwen3", "windows", "llama", "dflash2"])
def test_a_drafter_that_was_held_back_drafts_what_it_always_would(
    name: str, long_case_of: CaseOf
) -> None:
    case = filled(long_case_of(name))
    draft_tokens = case.built.drafter.spec.block_size - 1
    always = guesses_of(case, 0)
    decode(scheduler_of(case.rounds, EveryToken(draft_tokens, 0), always, slots=1), case)
    fed, compared = 0, 0
    for seed, (slots, chunk) in enumerate([(1, 16), (4, MAX_SEQ_LEN), (3, 5), (4, 16)]):
        policy = AtRandom(draft_tokens, seed, 0.1 if seed == 3 else 0.0)
        guesses = guesses_of(case, seed)
        decode(scheduler_of(case.rounds, policy, guesses, slots=slots, prefill_chunk=chunk), case)
        fed += policy.fed
        for at, (ids, probs) in guesses.said.items():
            # fewer may have been asked for
            expected_ids, expected = (each[: len(ids)] for each in always.said[at])
            np.testing.assert_allclose(probs, expected, atol=1e-4, rtol=0)
            assert np.mean(np.array(ids) == expected_ids) > 0.9  # but for ties
        compared += len(guesses.said)
        assert (guesses.lost > 20) == (seed == 3)
    assert fed > 0
    assert compared > 100


@pytest.mark.parametrize("adaptive", [False, True])
def test_who_asks_for_no_drafting_has_none(long_case_of: CaseOf, adaptive: bool) -> None:
    """The drafter goes on for others in the batch, and each token has its source."""
    case = long_case_of("qwen3")

    target = read_info(case.built.target_engine)
    adaptively = partial(strategy, Speculation(), target, COSTS["cheap"])
    greedy = [replace(request, drafting=False) for request in case.requests[::2]]
    for requests in (greedy, [*greedy, *case.requests[::2]]):
        policy = adaptively() if adaptive else (Fixed(7), None)
        sequences = run_all(scheduler_of(case.rounds, *policy), requests)
        assert [s.tokens for s in sequences] == (case.texts[::2] * 2)[: len(requests)]
        for sequence in sequences:
            assert len(sequence.sources) == len(sequence.tokens)
            assert sum(map(bool, sequence.sources)) == sequence.accepted
        assert not any(s.drafted for s in sequences[: len(greedy)])
        assert any(s.accepted for s in sequences[len(greedy) :]) == (requests is not greedy)
