"""What `losslessness` asks of a pair, and what its target says to each request alone."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from exact import run_all, scheduler_of
from pairs import Pair
from scheduler_model import SALTS

from dflash_trt.decoding import Grammar, Grammars, Request, RunRound, SamplingParams, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.onnxruntime import Engine

MAX_SEQ_LEN, LONGEST = 100, 24
END = 318  # the token that ends a text
# short enough to end within LONGEST tokens, most of the time
GRAMMARS = (
    Grammar("regex", "(ab|abc|[x-z]+)(-[0-9]{2}){1,4}"),
    Grammar("json_schema", '{"type": "array", "items": {"type": ["boolean", "null"]}}'),
    Grammar("lark", 'start: "call " name "(" /[0-9]{1,3}/ ")"\nname: "f" | "foo"'),
)


class Subject(NamedTuple):
    """A built pair, and what it is asked. Each batch decodes all of its requests."""

    what: str
    pair: Pair
    target: Engine
    rounds: RunRound
    requests: int
    batches: int
    telling: bool  # whether its texts are near those of the weights that were not quantized


class Expected(NamedTuple):
    request: Request
    tokens: list[int]
    logprobs: list[list[float]]
    reason: str | None
    tempting: list[int]  # the target's likeliest tokens, which its grammar may forbid


def alone(subject: Subject, dice: np.random.Generator, grammars: Grammars) -> list[Expected]:
    """Requests, of which the first fill the cache to its end, and what the target says alone."""
    constrained = dice.random() < 0.5
    rounds = in_process(subject.target, None)
    plain = scheduler_of(rounds, Fixed(0), slots=1, max_seq_len=MAX_SEQ_LEN)
    found: list[Expected] = []
    for i in range(subject.requests):
        length = int(dice.integers(1, MAX_SEQ_LEN - LONGEST if i % 4 else 12))
        stops = frozenset(dice.integers(END, size=4 if i % 3 else 0).tolist())
        prompt = dice.integers(END, size=length).tolist()
        if i % 3:  # many begin as another one's text did
            other = found[int(dice.integers(i))]
            prompt = [*other.request.prompt, *other.tokens, *prompt][: MAX_SEQ_LEN - LONGEST]
        most = MAX_SEQ_LEN - len(prompt) if i < 2 else int(dice.integers(1, LONGEST))
        salt = str(dice.choice(SALTS, p=[0.8, 0.1, 0.1]))
        request = Request(prompt, most, _sampling(dice), stops, cache_salt=salt)
        if constrained and dice.random() < 0.5:
            grammar, stops = GRAMMARS[dice.integers(len(GRAMMARS))], frozenset({END})
            scored = replace(request.sampling, logprobs=request.sampling.logprobs or 1)
            request = replace(request, sampling=scored, stop_ids=stops, grammar=grammar)
        (sequence,) = run_all(plain, [request], grammars)
        best = [ids[1] for ids in sequence.logprob_ids] if request.grammar else []
        found.append(
            Expected(request, sequence.tokens, sequence.logprobs, sequence.finish_reason, best)
        )
    return found


def _sampling(dice: np.random.Generator) -> SamplingParams:
    """Half of them greedy, of these most without a rule."""

    def at_times(value: Any, otherwise: Any, share: float = 0.3) -> Any:
        return value if dice.random() < share else otherwise

    if dice.random() < 0.4:
        return SamplingParams()
    return SamplingParams(
        temperature=at_times(float(dice.uniform(0.1, 1.5)), 0.0, 0.8),
        top_k=at_times(int(dice.integers(1, 40)), 0),
        top_p=at_times(float(dice.uniform(0.3, 1.0)), 1.0),
        min_p=at_times(0.05, 0.0),
        repetition_penalty=at_times(1.3, 1.0),
        presence_penalty=at_times(0.4, 0.0),
        frequency_penalty=at_times(0.2, 0.0),
        min_tokens=at_times(5, 0),
        bad_words=at_times(((7,), (3, 11)), ()),
        logprobs=at_times(5, None),
        seed=int(dice.integers(2**62)),
    )
