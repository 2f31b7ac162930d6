"""Answers under the schemas of the JSON Schema Test Suite, by a pair that no one trained."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from built_pairs import BuiltPair
from exact import run_all, scheduler_of
from guesses import COSTS
from jsonschema import validators
from referencing.exceptions import Unresolvable
from tokenizers import Tokenizer

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import Grammar, Grammars, Request, SamplingParams, in_process
from dflash_trt.decoding.speculation import Fixed, strategy
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import RequestError

END, NEW_TOKENS = 318, 120
# endless texts finish nothing: what closes a value is likelier than the pair has it
CLOSING = {'"': 7.0, "}": 6.0, "]": 6.0, ",": 2.0}


@dataclass
class Outcome:
    """What became of some schemas."""

    refused: dict[str, str] = field(default_factory=dict)  # by llguidance, and why
    answers: int = 0
    finished: int = 0
    unchecked: dict[str, str] = field(default_factory=dict)  # finished, by jsonschema, and why
    wrong: list[tuple[str, str]] = field(default_factory=list)  # schema and answer
    different: list[str] = field(default_factory=list)  # with drafts and without
    forced: int = 0  # tokens that the grammars forced, accepted as drafts
    tokens: int = 0


def suite(directory: Path, drafts: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """Of the suite's folder `tests`: draft, where it is, and the schema."""
    for draft in drafts:
        for file in sorted((directory / draft).rglob("*.json")):
            for case in json.loads(file.read_text(encoding="utf-8")):
                yield draft, f"{file.relative_to(directory)}: {case['description']}", case["schema"]


def run(built: BuiltPair, schemas: Iterable[tuple[str, str, Any]]) -> Outcome:
    """Greedy and sampled answers to each, with drafts and without."""
    target, drafter = Engine(built.target_engine), Engine(built.drafter_engine)
    tokenizer = Tokenizer.from_file(str(built.pair.target_dir / "tokenizer.json"))
    grammars = Grammars(tokenizer, target.info.vocab_size, [END])
    bias = tuple((tokenizer.token_to_id(text), value) for text, value in CLOSING.items())
    bias += ((END, 6.0),)
    outcome, requests, known = Outcome(), list[Request](), list[tuple[str, str, Any]]()
    for number, (draft, place, schema) in enumerate(schemas):
        grammar = Grammar("json_schema", json.dumps(_declared(draft, schema), ensure_ascii=False))
        try:
            grammars.matcher(grammar)
        except RequestError as error:
            outcome.refused[place] = str(error)
            continue
        for sampling in (
            SamplingParams(logit_bias=bias),
            SamplingParams(0.8, seed=number, logit_bias=bias),
        ):
            prompt = built.texts[number % len(built.texts)][:14]
            stop = frozenset({END})
            requests.append(Request(prompt, NEW_TOKENS, sampling, stop, grammar=grammar))
            known.append((draft, place, schema))
    plain = run_all(scheduler_of(in_process(target, None), Fixed(0)), requests, grammars)
    policy = strategy(Speculation(), target.info, COSTS["cheap"])
    drafted = run_all(scheduler_of(in_process(target, drafter), *policy), requests, grammars)
    for (draft, place, schema), alone, fast in zip(known, plain, drafted, strict=True):
        outcome.answers += 1
        outcome.tokens += len(fast.tokens)
        outcome.forced += Counter(fast.sources)[4]
        if (alone.tokens, alone.finish_reason) != (fast.tokens, fast.finish_reason):
            outcome.different.append(place)
        if alone.finish_reason != "stop":
            continue
        outcome.finished += 1
        text = tokenizer.decode([token for token in alone.tokens if token != END])
        try:
            valid = _valid(draft, schema, text)
        except (re.error, Unresolvable) as error:  # what jsonschema cannot judge
            outcome.unchecked[place] = str(error)
        else:
            outcome.wrong += [] if valid else [(place, text)]
    return outcome


def _valid(draft: str, schema: Any, text: str) -> bool:
    cls = validators.validator_for({"$schema": _uri(draft)})
    return bool(cls(schema).is_valid(json.loads(text)))


def _declared(draft: str, schema: Any) -> Any:
    """A schema that says its draft: llguidance takes it for 2020-12 otherwise."""
    return {"$schema": _uri(draft), **schema} if isinstance(schema, dict) else schema


def _uri(draft: str) -> str:
    number = draft.removeprefix("draft")
    if "-" in number:
        return f"https://json-schema.org/draft/{number}/schema"
    return f"http://json-schema.org/draft-0{number}/schema#"
