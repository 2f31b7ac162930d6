"""Rules that keep few tokens look at few tokens, and choose what sorting all of them would.

`RULES_EXAMPLES=100000` tries more than the 4,000 cases of `make test`.
"""

import os
from dataclasses import replace

import numpy as np

from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.sampling import NO_TOKEN, SamplingParams, sample
from tests.support.random_rules import SIZES, logits_of, mask_of, rules_of
from tests.support.whole_sampling import sampled, weights_of

EXAMPLES = int(os.environ.get("RULES_EXAMPLES", "4000"))
MOST_DIFFERENT = EXAMPLES // 100_000  # where the border of top_p is within a sum's rounding


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
        likely = processor.likely(logits, 12, history, mask)
        found = sample([likely], [rules.seed], [12])[0]
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
        LogitsProcessor(replace(rule, temperature=0.9), 1, ()).likely(
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
