"""JSON under a schema with long property names: plain decoding, and with drafts, the same grammar.

    python -m pytest tests/benchmarks/bench_structured.py -o addopts= -s

Of the demo pair; STRUCTURED_BUILD names another build's directory, such as that of
build_configs/smollm2.yaml. The ways take turns on each prompt; bar of forced tokens with the policy
adaptive: 1.5 with such a build. The demo pair's steps are so short that other work counts as much.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import demo_pair
import jsonschema
from pycode import PYCODE
from pytest_benchmark.fixture import BenchmarkFixture
from tokenizers import Tokenizer

from dflash_trt.config import Speculation
from dflash_trt.decoding import (
    Grammar,
    Grammars,
    Request,
    RunRound,
    SamplingParams,
    Scheduler,
    in_process,
)
from dflash_trt.decoding.speculation import Fixed, Policy, Proposer, profile_of, strategy
from dflash_trt.engines import Engine, load_engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identifier": {"type": "integer", "minimum": 1, "maximum": 99999},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 24},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country_of_residence": {"enum": ["Germany", "France", "Italy"]},
            },
            "required": ["street_and_number", "postal_code", "country_of_residence"],
            "additionalProperties": False,
        },
        "preferred_contact_method": {"enum": ["electronic_mail", "telephone", "letter"]},
        "loyalty_points_collected": {"type": "integer", "minimum": 0, "maximum": 9999},
        "is_newsletter_subscriber": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = [*SCHEMA["properties"]]
PROMPTS = [
    f"Describe {who} as JSON with the fields asked for.\n"
    for who in ("a customer from Berlin", "Marie, 34, from Lyon", "a pensioner", "Luca Rossi")
]
REPEATS, MAX_TOKENS = int(os.environ.get("STRUCTURED_REPEATS", "3")), 200


def test_structured(benchmark: BenchmarkFixture) -> None:
    build = os.environ.get("STRUCTURED_BUILD")
    engines = Path(build) / "engines" if build else demo_pair.engines()
    file = Path(build) / "tokenizer" if build else PYCODE / "target"
    tokenizer = Tokenizer.from_file(str(file / "tokenizer.json"))
    target, drafter = (load_engine(engines / role) for role in ("target", "drafter"))
    ends = [i for i in (tokenizer.token_to_id(x) for x in ("<|im_end|>", "<|end|>")) if i]
    grammars = Grammars(tokenizer, target.info.vocab_size, ends)
    both, alone = in_process(target, drafter), in_process(target, None)
    costs = profile_of(engines, "in_process", both)
    ways: dict[str, Scheduler] = {
        "plain": _scheduler(target, alone, Fixed(0)),
        "adaptive": _scheduler(target, both, *strategy(Speculation(), target.info, costs)),
        "without the drafter": _scheduler(
            target, alone, *strategy(Speculation(), target.info, costs)
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    forced: list[float] = []
    tau: list[float] = []

    def run() -> None:
        for temperature in (0.0, 0.8):
            for repeat in range(REPEATS):
                for i, prompt in enumerate(PROMPTS):
                    sampling = SamplingParams(temperature, seed=100 * repeat + i)
                    grammar = Grammar("json_schema", json.dumps(SCHEMA))
                    ids = tokenizer.encode(prompt).ids
                    request = Request(ids, MAX_TOKENS, sampling, frozenset(ends), grammar=grammar)
                    texts = {}
                    for name, scheduler in ways.items():
                        sequence = scheduler.submit(request, grammars.matcher(grammar))
                        while not sequence.tokens:
                            scheduler.step()
                        start = time.perf_counter()
                        while scheduler.busy:
                            scheduler.step()
                        seconds = time.perf_counter() - start
                        rates[name].append((len(sequence.tokens) - 1) / seconds)
                        texts[name] = sequence.tokens
                        if name == "adaptive":
                            forced.append(sequence.sources.count(4) / len(sequence.tokens))
                            tau.append(sequence.acceptance_length)
                    assert texts["plain"] == texts["adaptive"] == texts["without the drafter"]
                    assert sequence.finish_reason == "stop"
                    jsonschema.validate(json.loads(tokenizer.decode(sequence.tokens)), SCHEMA)

    benchmark.pedantic(run, rounds=1, iterations=1)
    lines = [f"forced: {median(forced):.0%} of the tokens, tau {median(tau):.2f}"]
    for name, values in rates.items():
        ratios = [fast / slow for fast, slow in zip(values, rates["plain"], strict=True)]
        lines.append(
            f"{name}: {demo_pair.spread(values)} tokens/s, {demo_pair.spread(ratios)} times plain"
        )
    benchmark.extra_info.update(machine=demo_pair.machine(), lines=lines)
    demo_pair.show("JSON under a schema, against plain decoding (bar: 1.5)", lines)
    ratios = [fast / slow for fast, slow in zip(rates["adaptive"], rates["plain"], strict=True)]
    demo_pair.hold("JSON with forced tokens", ratios, least=1.5 if build else 0.0)


def _scheduler(
    target: Engine, rounds: RunRound, policy: Policy, proposer: Proposer | None = None
) -> Scheduler:
    make = partial(Scheduler, rounds, slots=1, max_seq_len=target.info.max_seq_len)
    return make(prefill_chunk=target.info.widest, policy=policy, proposer=proposer)
