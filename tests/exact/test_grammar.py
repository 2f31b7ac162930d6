"""Texts that follow a grammar: those of plain decoding under it, whatever is proposed and by whom.

The oracle of plain decoding itself is `transformers` with llguidance's masks, token by token.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Grammar,
    Grammars,
    Request,
    SamplingParams,
    SequenceState,
    in_process,
    strategy,
)
from dflash_trt.decoding.grammar import JSON_STYLE
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Fixed
from tests.support import equality as exact
from tests.support import reference
from tests.support.built_pairs import BuildPair, BuiltPair
from tests.support.equality import run_all
from tests.support.random_proposals import COSTS

MAX_SEQ_LEN, NEW_TOKENS = 400, 60
SAMPLES = Path(__file__).parents[1] / "samples"
scheduler_of = partial(exact.scheduler_of, max_seq_len=MAX_SEQ_LEN)

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "temperature": {"type": "integer", "minimum": -99, "maximum": 99},
            "weather": {"enum": ["sunny", "rainy", "snow"]},
            "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        },
        "required": ["temperature", "weather", "names"],
        "additionalProperties": False,
    }
)
LIST = json.dumps({"type": "array", "items": {"type": ["boolean", "null"]}})
GRAMMARS = (
    Grammar("json_schema", SCHEMA),
    Grammar("regex", "(ab|abc|[x-z]+)(-[0-9]{2}){1,9}"),
    Grammar("lark", 'start: "call " name "(" %json {"type": "integer"} ")"\nname: "f" | "foo"'),
    Grammar("json_schema", '{"type": "object"}'),
    Grammar("json_schema", LIST),
)


@dataclass(frozen=True)
class Case:
    built: BuiltPair
    grammars: Grammars
    requests: list[Request]
    plain: list[SequenceState]


pytestmark = pytest.mark.usefixtures("made_up_time")


@pytest.fixture(scope="module")
def case(built_pair: BuildPair) -> Case:
    built = built_pair(max_seq_len=MAX_SEQ_LEN, family="qwen3", taps=(1, 2))
    target = Engine(built.target_engine)
    tokenizer = Tokenizer.from_file(str(built.pair.target_dir / "tokenizer.json"))
    end = target.info.vocab_size - 2
    grammars = Grammars(tokenizer, target.info.vocab_size, [end])
    requests = [
        Request(text[:14], NEW_TOKENS, stop_ids=frozenset({end}), grammar=grammar)
        for grammar, text in zip(GRAMMARS, built.texts, strict=False)
    ]
    plain = scheduler_of(in_process(target, None), Fixed(0))
    return Case(built, grammars, requests, run_all(plain, requests, grammars))


def test_plain_texts_are_transformers_under_llguidances_masks(case: Case) -> None:
    model = reference.load_target(case.built.pair.target_dir)
    json_text = (case.built.pair.target_dir / "tokenizer.json").read_text()
    vocabulary = llguidance.LLTokenizer(json_text, n_vocab=320, eos_token=[318])
    for request, sequence in zip(case.requests, case.plain, strict=True):
        assert request.grammar is not None
        kind, options = request.grammar.kind, (JSON_STYLE,)
        make = getattr(llguidance.LLMatcher, f"grammar_from_{kind}")
        grammar = make(request.grammar.text, *(options if kind == "json_schema" else ()))
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        text: list[int] = []
        while len(text) < NEW_TOKENS and not matcher.is_stopped():
            with torch.no_grad():
                logits = model(torch.tensor([[*request.prompt, *text]])).logits[0, -1].numpy()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            text.append(int(allowed[logits[allowed].argmax()]))
            assert matcher.consume_token(text[-1])
        assert sequence.tokens == text


def test_forced_tokens_are_drafts_for_free(case: Case) -> None:
    """There is no drafter, or a policy that never runs it."""
    target = Engine(case.built.target_engine)
    request = case.requests[0]
    policy = strategy(Speculation(), target.info, COSTS["cheap"])
    scheduler = scheduler_of(in_process(target, None), *policy)
    (sequence,) = run_all(scheduler, [request], case.grammars)
    assert sequence.tokens == case.plain[0].tokens
    assert sequence.sources.count(4) > 30  # "grammar"
    assert sequence.rounds < len(sequence.tokens) / 3
    (alone,) = run_all(scheduler, [replace(request, drafting=False)], case.grammars)
    assert (alone.tokens, alone.rounds) == (sequence.tokens, len(sequence.tokens) - 1)


@pytest.mark.models
def test_answers_under_schemas_of_all_keywords_are_valid(built_pair: BuildPair) -> None:
    cases = json.loads((SAMPLES / "json_schemas.json").read_text(encoding="utf-8"))
    built = built_pair(family="qwen3", taps=(1, 2))
    target, drafter = Engine(built.target_engine), Engine(built.drafter_engine)
    tokenizer = Tokenizer.from_file(str(built.pair.target_dir / "tokenizer.json"))
    grammars = Grammars(tokenizer, target.info.vocab_size, [318])
    # endless texts finish nothing: what closes a value is likelier than the pair has it
    closing = {'"': 7.0, "}": 6.0, "]": 6.0, ",": 2.0}
    bias = (*((tokenizer.token_to_id(text), value) for text, value in closing.items()), (318, 6.0))
    requests = [
        Request(
            built.texts[i % len(built.texts)][:14],
            120,
            replace(sampling, logit_bias=bias),
            frozenset({318}),
            grammar=Grammar("json_schema", json.dumps(case["schema"], ensure_ascii=False)),
        )
        for i, case in enumerate(cases)
        for sampling in (SamplingParams(), SamplingParams(0.8, seed=i))
    ]
    plain = run_all(exact.scheduler_of(in_process(target, None), Fixed(0)), requests, grammars)
    policy = strategy(Speculation(), target.info, COSTS["cheap"])
    drafted = run_all(exact.scheduler_of(in_process(target, drafter), *policy), requests, grammars)
    finished = forced = 0
    for case, alone, fast in zip([x for x in cases for _ in "ab"], plain, drafted, strict=True):
        assert (alone.tokens, alone.finish_reason) == (fast.tokens, fast.finish_reason), case
        forced += fast.sources.count(4)
        if alone.finish_reason == "stop":
            finished += 1
            text = tokenizer.decode([token for token in alone.tokens if token != 318])
            jsonschema.Draft202012Validator(case["schema"]).validate(json.loads(text))
    assert finished > 0.9 * len(requests)
    assert forced > 0
