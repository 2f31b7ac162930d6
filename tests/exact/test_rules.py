"""Rules that keep few tokens look at few tokens, and choose what sorting all of them would.

`RULES_EXAMPLES=100000` tries more than the 4,000 cases of `make test`.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.sampling import NO_TOKEN, SamplingParams, sample
from tests.support.whole_sampling import sampled, weights_of

EXAMPLES = int(os.environ.get("RULES_EXAMPLES", "4000"))
MOST_DIFFERENT = EXAMPLES // 100_000  # where the border of top_p is within a sum's rounding
SIZES = (1, 2, 7, 64, 65, 300, 2000, 20_000)
Dice = np.random.Generator
Array = np.ndarray[Any, Any]


def logits_of(dice: Dice, vocab: int) -> Array:
    """Return logits that are flat or peaked, with ties, or of which some are impossible."""
    logits = dice.normal(0, dice.choice([0.01, 1, 3, 8]), vocab)
    match dice.integers(6):
        case 0:
            logits = np.round(logits)  # ties
        case 1:
            logits = np.round(logits, 1)
        case 2:
            logits[dice.random(vocab) < 0.5] = -np.inf
        case 3:
            logits[dice.integers(vocab)] += 30  # nearly certain
    return logits.astype(np.float32)


def one_of(dice: Dice, plain: Any, *others: Any) -> Any:
    return plain if dice.random() < 0.6 else others[dice.integers(len(others))]


def rules_of(dice: Dice, vocab: int, history: list[int]) -> SamplingParams:
    tokens = [int(token) for token in dice.integers(0, vocab, 3)]
    return SamplingParams(
        temperature=float(one_of(dice, 1.0, 0.0, 0.6, 0.1, 1.7)),
        top_k=int(one_of(dice, 0, 1, 5, 20, 64, 1000)),
        top_p=float(one_of(dice, 1.0, 0.95, 0.5, 0.999, 1e-6)),
        min_p=float(one_of(dice, 0.0, 0.05, 0.5, 1.0)),
        repetition_penalty=float(one_of(dice, 1.0, 1.3, 0.7)),
        presence_penalty=float(one_of(dice, 0.0, 0.5)),
        frequency_penalty=float(one_of(dice, 0.0, 0.3)),
        min_tokens=int(one_of(dice, 0, 9)),
        bad_words=one_of(dice, (), ((history[-1], tokens[0]), (tokens[1],))),
        logit_bias=one_of(dice, (), ((tokens[0], 9.0), (tokens[2], -100.0))),
        seed=int(dice.integers(2**62)),
    )


def mask_of(allowed: Array) -> Array:
    bits = np.packbits(allowed, bitorder="little")
    words = np.zeros(-(-len(allowed) // 32) * 4, np.uint8)
    words[: len(bits)] = bits
    return words.view(np.int32)


def test_all_rules_together_choose_what_sorting_the_vocabulary_would() -> None:
    different = 0
    for number in range(EXAMPLES):
        dice = np.random.default_rng(number)
        vocab = int(dice.choice(SIZES))
        logits = logits_of(dice, vocab)
        history = [int(token) for token in dice.integers(0, vocab, 12)]
        rules = rules_of(dice, vocab, history)
        stop_ids = (0,) if vocab > 1 else ()
        processor = LogitsProcessor(rules, prompt_tokens=8, stop_ids=stop_ids)
        allowed = None
        if dice.random() < 0.3:
            allowed = dice.random(vocab) < dice.choice([0.02, 0.5, 1.0])
        usable = np.isfinite(logits) if allowed is None else np.isfinite(logits) & allowed
        mask = None if allowed is None else mask_of(allowed)
        weights = processor.weights(logits, 12, history, mask)
        found = sample([weights], [rules.seed], [12])[0]
        if not usable.any():
            assert found == NO_TOKEN
            continue
        different += found != sampled(processor, logits, 12, history, allowed)
    assert different <= MOST_DIFFERENT


def test_logits_stay_as_they_are() -> None:
    """They are the engine's, and log-probabilities are of them."""
    logits = np.random.default_rng(0).normal(0, 3, 500).astype(np.float32)
    before = logits.copy()
    rules = SamplingParams(1.0, 5, 0.9, 0.1, 1.2, logit_bias=((3, 5.0),), bad_words=((7,),))
    LogitsProcessor(rules, 2, ()).weights(logits, 4, [1, 2, 3, 4], mask_of(logits > -2))
    assert (logits == before).all()


def test_a_rows_token_does_not_depend_on_the_rows_beside_it() -> None:
    dice = np.random.default_rng(3)
    rules = [rules_of(dice, 3000, [1, 2, 3]) for _ in range(16)]
    rows = [
        LogitsProcessor(replace(rule, temperature=0.9), 1, ()).weights(
            logits_of(dice, 3000), 3, [1, 2, 3]
        )
        for rule in rules
    ]
    seeds = [rule.seed for rule in rules]
    together = sample(rows, seeds, [3] * 16)
    assert together == [
        sample([row], [seed], [3])[0] for row, seed in zip(rows, seeds, strict=True)
    ]


def test_values_are_the_weights_of_whole_vocabularies() -> None:
    dice = np.random.default_rng(4)
    for rules in (SamplingParams(0.6, 20, 0.95), SamplingParams(1.0, min_p=0.05)):
        logits = logits_of(dice, 2000)
        processor = LogitsProcessor(rules, 1, ())
        weights = processor.weights(logits, 3, [])
        whole = weights_of(processor, logits, 3, [])
        assert weights.ids is not None
        assert weights.ids.tolist() == np.flatnonzero(whole).tolist()
        assert weights.values.tolist() == whole[weights.ids].tolist()
