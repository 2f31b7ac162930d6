"""Time how NumPy accepts a round's drafts: `python scripts/accept_cost.py [VOCABULARY]`.

Every row samples a token at its first place, which is no draft. Logits are random, and peaked as a
model's: few are far above all others. Beside the milliseconds is what reading the logits once
takes, as memory may be busy.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_trt.decoding.acceptance import accept
from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.messages import RoundSequence
from dflash_trt.decoding.sampling import SamplingParams

ROWS = (1, 8, 32)
PLACES = 8
TEXT, PROMPT = 500, 400
REPEATS = 20
RULES: dict[str, dict[str, Any]] = {
    "T 1": {"temperature": 1.0},
    "T 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T 0.6, top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "T 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "T 1, penalties, bias, top-p 0.95": {
        "temperature": 1.0,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "logit_bias": ((5, 1.0),),
    },
}


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main(vocab: int = 151_936) -> None:
    dice = np.random.default_rng(0)
    random = dice.normal(0, 3, (ROWS[-1], PLACES, vocab)).astype(np.float32)
    peaked = random - 12
    peaked[..., : vocab // 750] += dice.exponential(6, peaked[..., : vocab // 750].shape)
    history = dice.integers(0, vocab, TEXT).tolist()
    for name, logits in (("random", random), ("peaked", peaked)):
        reading = [milliseconds(lambda: logits[:n, 0].max(-1)) for n in ROWS]  # noqa: B023
        print(f"{name}, reading once:", *(f"{each:.2f}" for each in reading))
        for title, rules in RULES.items():
            times = []
            for n in ROWS:
                rows = [
                    RoundSequence(
                        [1] * PLACES,
                        known=1,
                        position=TEXT,
                        budget=99,
                        processor=LogitsProcessor(SamplingParams(seed=seed, **rules), PROMPT, ()),
                        history=history,
                    )
                    for seed in range(n)
                ]
                likeliest = [[0] * PLACES] * n
                times.append(milliseconds(lambda: accept(rows, likeliest, lambda: logits)))  # noqa: B023
            print(f"{name}, {title}:", *(f"{each:.2f}" for each in times))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
