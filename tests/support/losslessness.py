"""Random pairs, storage, policies, reuse, grammars, traffic: every text is the target's, as
if alone, and where it is plain greedy that of `transformers`.

A quantized target's log-probabilities are so bit for bit: where little is not lost, much may be.
Its texts are near those of `transformers`.

`python -m tests.support.losslessness 20000` (`make prove`) runs so many prompts, a random pair a
process, and prints how many there were of what, and all that differs.
"""

import os
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from dflash_trt.config import Storage
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Grammar,
    Grammars,
    Proposer,
    Request,
    RunRound,
    SamplingParams,
    Scheduler,
    SequenceState,
    in_process,
    strategy,
)
from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Adaptive, Fixed, Policy
from dflash_trt.weights.gguf import as_directory
from tests.support import ggufs, reference
from tests.support.builds import build_engines
from tests.support.equality import prefix_cache_of, run_all, scheduler_of, submit
from tests.support.families import FAMILIES, FORMATS, MOE, pair_of
from tests.support.pairs import Pair
from tests.support.random_proposals import COSTS, AtRandom, Guesses
from tests.support.scheduler_model import SALTS

SLOTS = 16
MAX_SEQ_LEN, LONGEST = 100, 24
END = 318  # the token that ends a text
# short enough to end within LONGEST tokens, most of the time
GRAMMARS = (
    Grammar("regex", "(ab|abc|[x-z]+)(-[0-9]{2}){1,4}"),
    Grammar("json_schema", '{"type": "array", "items": {"type": ["boolean", "null"]}}'),
    Grammar("lark", 'start: "call " name "(" /[0-9]{1,3}/ ")"\nname: "f" | "foo"'),
)
STORAGE: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "int8": {"storage": Storage(bits=8)},
    "int4": {"storage": Storage(bits=4)},
    "int8 inputs": {"storage": Storage(bits=8, int8_inputs=True)},
    "blocks": {"storage": Storage(keep_blocks=True)},  # of a GGUF file
}
KEPT = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4)
NEAR = 1e-3  # logits that far apart may change places between two ways to add up the same sum
# what quantized tokens lose of the best logit on average, in deviations of the logits, at most:
# int8 of random pairs 0.002 to 0.044, with the mask of another layer 0.2; int4 of them says nothing
LOST = 0.1
SAMPLED = 0.25  # of the texts, at least, are sampled under random rules; most runs have half


class Subject(NamedTuple):
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
    """Return requests, the first filling the cache to its end, and the target's texts alone."""
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
    """Return parameters: half of them greedy, most of those without a rule."""

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
        logit_bias=at_times(((5, 1.5), (11, -100.0)), ()),
    )


def run(
    seed: int, directory: Path, requests: int = 64, batches: int = 8
) -> tuple[int, list[str], Counter[str]]:
    """Run all prompts of a random pair; return their number, differences, and what was covered."""
    storage = [*STORAGE][seed % len(STORAGE)]
    dice = np.random.default_rng(seed)
    cell = str(dice.choice([*FAMILIES])), str(dice.choice([*FORMATS]))
    counts = Counter[str]({f"storage {storage}": 1, f"family {cell[0]}": 1, f"format {cell[1]}": 1})
    if storage == "blocks" and cell[0] == "gemma4":
        storage = "float32"  # its tiny config has towers, which no file has
    dtype = "bfloat16" if storage == "bfloat16" else "float32"
    pair = pair_of(*cell, directory, seed=seed, dtype=dtype)
    if storage == "blocks":
        file = directory / "target.gguf"
        ggufs.write(file, pair.target_dir, KEPT[dice.integers(len(KEPT))], seed=seed)
        pair = Pair(as_directory(file), pair.drafter_dir)
    target, rounds = _built(pair, directory, storage)
    # as on a CPU with another kernel for one sequence
    if seed // len(STORAGE) % 2 and target.info.quantized:
        target.least_tokens = 2
    # a router that takes another expert for a rounded input changes the whole token
    rounded = storage == "int8 inputs" and cell[0] in MOE
    what, telling = f"{storage} {cell}", storage not in ("int4", "blocks") and not rounded
    subject = Subject(what, pair, target, rounds, requests, batches, telling)
    return _prompt_runs(subject, dice, counts)


def _built(pair: Pair, directory: Path, storage: str) -> tuple[Engine, RunRound]:
    engines, sizes = directory / "engines", {"slots": SLOTS, "max_seq_len": MAX_SEQ_LEN}
    build_engines(pair.target_dir, pair.drafter_dir, engines, **sizes, **STORAGE[storage])
    target = Engine(engines / "target")
    return target, in_process(target, Engine(engines / "drafter"))


def _prompt_runs(
    subject: Subject, dice: np.random.Generator, counts: Counter[str]
) -> tuple[int, list[str], Counter[str]]:
    # costs are made up: what rounds really take would make another choice each time
    with patch.object(Adaptive, "timed", lambda *_: None):
        target = subject.target.info
        tokenizer = Tokenizer.from_file(str(subject.pair.target_dir / "tokenizer.json"))
        grammars = Grammars(tokenizer, target.vocab_size, [END])
        expected = alone(subject, dice, grammars)
        wrong = _against_transformers(subject, expected, counts) if subject.telling else []
        for batch in range(subject.batches):
            scheduler, what = _scheduler(target, subject.rounds, expected, dice)
            for each, sequence in _decode(
                scheduler, expected, dice, counts, grammars, target.quantized
            ):
                got = f"{sequence.tokens} ({sequence.finish_reason}), alone {each.tokens}"
                wrong.append(f"{subject.what}, batch {batch}, {what}: {got}; {each.request}")
    return subject.batches * len(expected), wrong, counts


@torch.inference_mode()
def _against_transformers(
    subject: Subject, expected: list[Expected], counts: Counter[str]
) -> list[str]:
    """Return greedy texts that `transformers` would not choose, except near ties.

    For a quantized target, return whether many would differ.
    """
    model, wrong, shares = reference.load_target(subject.pair.target_dir), [], []
    for each in expected:
        request = each.request
        if request.sampling == SamplingParams() and request.grammar is None:
            ids = torch.tensor([[*request.prompt, *each.tokens]])
            logits = model(ids).logits[0, len(request.prompt) - 1 : -1]
            best, own = logits.max(-1).values, torch.tensor(each.tokens)[:, None]
            lost = best - logits.gather(1, own)[:, 0]
            counts["transformers"] += 1
            shares += (lost / logits.std(-1)).tolist()
            if lost.max() > NEAR and not subject.target.info.quantized:
                wrong.append(f"not transformers' by {lost.max():.4f}: {each.tokens}; {request}")
    if subject.target.info.quantized and np.mean(shares) > LOST:
        wrong.append(f"{subject.what}: {np.mean(shares):.2f} from transformers on average")
    return wrong


def _scheduler(
    target: EngineInfo, rounds: RunRound, expected: list[Expected], dice: np.random.Generator
) -> tuple[Scheduler, str]:
    texts = {id(each.request): each.tokens for each in expected}
    tempting = {id(each.request): each.tempting for each in expected}
    guesses = Guesses(texts, target, int(dice.integers(2**32)), tempting)
    drafts = int(dice.integers(1, target.block_size))
    policy: Policy
    proposer: Proposer | None
    kind = str(dice.choice(["plain", "fixed", "guessed", "adaptive", "random"]))
    if kind == "plain":
        policy, proposer = Fixed(0), None
    elif kind in ("fixed", "guessed"):
        policy, proposer = Fixed(drafts), guesses if kind == "guessed" else None
    elif kind == "adaptive":
        lookup, costs = bool(dice.random() < 0.7), COSTS[str(dice.choice([*COSTS]))]
        policy, proposer = strategy(Speculation(lookup=lookup), target, costs)
        proposer = guesses if dice.random() < 0.3 else proposer
    else:
        policy = AtRandom(drafts, int(dice.integers(2**32)), float(dice.choice([0.0, 0.03])))
        proposer = guesses
    slots, chunk = int(dice.integers(1, SLOTS + 1)), int(dice.choice([1, 2, 5, 16, MAX_SEQ_LEN]))
    first = int(dice.integers(SLOTS + 1 - slots))
    blocks = int(dice.choice([0, 9, 10**4]))
    scheduler = scheduler_of(
        rounds,
        policy,
        proposer,
        slots=slots,
        max_seq_len=MAX_SEQ_LEN,
        prefill_chunk=chunk,
        prefix_cache=prefix_cache_of(target, blocks) if blocks else None,
        first_slot=first,
    )
    return scheduler, f"{kind}, {slots} slots from {first}, chunk {chunk}, {blocks} blocks kept"


def _decode(
    scheduler: Scheduler,
    asked: list[Expected],
    dice: np.random.Generator,
    verified: Counter[str],
    grammars: Grammars,
    bits: bool,
) -> list[tuple[Expected, SequenceState]]:
    """Decode all in random order, joining while others run; return the differences.

    Some are cancelled, some lose their drafter to an update. bits: whether log-probabilities must
    be equal bit for bit.
    """
    waiting = [asked[i] for i in dice.permutation(len(asked))]
    pace, cancelled = dice.choice([0.2, 1.0]), dice.choice([0.0, 0.1])
    swapped = dice.choice([0.0, 0.01])
    started: list[
        tuple[Expected, SequenceState, int]
    ] = []  # and at how many tokens it is cancelled
    while waiting or scheduler.has_work:
        while waiting and dice.random() < pace:
            each = waiting.pop()
            end = int(dice.integers(LONGEST)) if dice.random() < cancelled else MAX_SEQ_LEN
            started.append((each, submit(scheduler, each.request, grammars), end))
        if dice.random() < swapped:
            verified["swapped"] += 1
            for sequence in scheduler.sequences:
                sequence.lose_drafter()
        scheduler.step()
        if scheduler.report is not None:
            verified.update(scheduler.report.choices)
        for _, sequence, end in started:
            if len(sequence.tokens) >= end:
                scheduler.finish(sequence, "cancelled")
    verified["sampled"] += sum(each.request.sampling.temperature > 0 for each, _, _ in started)
    verified["top_p"] += sum(each.request.sampling.top_p < 1 for each, _, _ in started)
    verified["reused"] += sum(sequence.cached_tokens > 0 for _, sequence, _ in started)
    return [
        (each, sequence)
        for each, sequence, _ in started
        if sequence.tokens != each.tokens[: len(sequence.tokens)]
        or (bits and sequence.logprobs != each.logprobs[: len(sequence.logprobs)])
        or sequence.finish_reason not in (each.reason, "cancelled")
        or (sequence.finish_reason != "cancelled" and len(sequence.tokens) != len(each.tokens))
    ]


def one_seed(seed: int) -> tuple[int, list[str], Counter[str]]:
    with tempfile.TemporaryDirectory() as name:
        torch.set_num_threads(1)
        try:
            return run(seed, Path(name))
        except BaseException:
            return 0, [f"seed {seed}: {traceback.format_exc()}"], Counter()


def main(count: int) -> int:
    done, wrong, counts = 0, list[str](), Counter[str]()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), max_tasks_per_child=1) as pool:
        for each in as_completed([pool.submit(one_seed, seed) for seed in range(-(-count // 512))]):
            cases, different, met = each.result()
            done, wrong = done + cases, wrong + different
            counts.update(met)
            print(f"{done} prompts, {len(wrong)} different", *different, sep="\n", flush=True)
    print(*(f"{name}: {number}" for name, number in sorted(counts.items())), sep="\n")
    return int(bool(wrong) or done < count or counts["sampled"] < SAMPLED * done)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
