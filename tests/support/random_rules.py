"""Random logits, rules and masks of grammars: ties, infinities, and all rules together."""

from typing import Any

import numpy as np

from dflash_trt.decoding.sampling import SamplingParams

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
