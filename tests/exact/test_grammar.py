"""Texts that follow a grammar: those of plain decoding under it, whatever is proposed and by whom.

The oracle of plain decoding itself is `transformers` with llguidance's masks, token by token.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import exact
import families
import jsonschema
import llguidance
import numpy as np
import pytest
import reference
import torch
from built_pairs import BuildPair, BuiltPair, built_from
from exact import run_all, submit
from guesses import COSTS, AtRandom, Guesses
from tokenizers import Tokenizer

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Grammar,
    Grammars,
    Request,
    RoundOutput,
    RunRound,
    SamplingParams,
    Scheduler,
    SequenceState,
    VerifyInput,
    in_process,
)
from dflash_trt.decoding.grammar import JSON_STYLE
from dflash_trt.decoding.speculation import Fixed, strategy
from dflash_trt.engines.info import read_info
from dflash_trt.engines.onnxruntime import Engine

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
    None,
)
SAMPLING = (
    SamplingParams(),
    SamplingParams(0.8, seed=3),
    SamplingParams(1.0, top_k=20, top_p=0.9, repetition_penalty=1.3, seed=4),
    SamplingParams(0.6, min_p=0.05, min_tokens=9, logprobs=2, seed=2**62),
    SamplingParams(bad_words=((5,), (7, 8)), presence_penalty=0.5, logit_bias=((60, 3.5),)),
)


@dataclass(frozen=True)
class Case:
    """A pair, requests under all grammars, and the texts that they must lead to."""

    built: BuiltPair
    rounds: RunRound
    grammars: Grammars
    requests: list[Request]
    plain: list[SequenceState]


pytestmark = pytest.mark.usefixtures("made_up_time")


def case_for(built: BuiltPair) -> Case:
    target, drafter = Engine(built.target_engine), Engine(built.drafter_engine)
    tokenizer = Tokenizer.from_file(str(built.pair.target_dir / "tokenizer.json"))
    end = target.info.vocab_size - 2
    grammars = Grammars(tokenizer, target.info.vocab_size, [end])
    requests = [
        Request(text[: 14 + 5 * i], NEW_TOKENS, sampling, frozenset({end}), grammar=grammar)
        for i, sampling in enumerate(SAMPLING)
        for grammar, text in zip(GRAMMARS, built.texts, strict=False)
    ]
    plain = scheduler_of(in_process(target, None), Fixed(0))
    return Case(
        built,
        in_process(target, drafter),
        grammars,
        requests,
        run_all(plain, requests, grammars),
    )


CaseOf = Callable[[str], Case]


@pytest.fixture(scope="module")
def case_of(built_pair: BuildPair, tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    cases: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in cases:
            if name == "dflash2":
                directory = tmp_path_factory.mktemp(name)
                pair = families.make(name, directory)
                built = built_from(pair, directory, max_seq_len=MAX_SEQ_LEN)
            else:
                built = built_pair(max_seq_len=MAX_SEQ_LEN, family="qwen3", taps=(1, 2))
            cases[name] = case_for(built)
        return cases[name]

    return get


def decode(scheduler: Scheduler, case: Case) -> Counter[str]:
    """All requests, joining while others run; asserts the texts. What was verified, how often."""
    choices: Counter[str] = Counter()
    sequences: list[SequenceState] = []
    waiting = list(case.requests)
    for turn in itertools.count():
        if waiting and turn % 3 == 0:
            sequences.append(submit(scheduler, waiting.pop(0), case.grammars))
        scheduler.step()
        if scheduler.report is not None:
            choices.update(scheduler.report.choices)
        if not (waiting or scheduler.busy):
            break
    for found, expected in zip(sequences, case.plain, strict=True):
        assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)
        assert len(found.sources) == len(found.tokens)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-3)
    return choices


def text_of(case: Case, sequence: SequenceState) -> str:
    tokenizer = Tokenizer.from_file(str(case.built.pair.target_dir / "tokenizer.json"))
    return tokenizer.decode(sequence.tokens)  # but for special tokens


# --- plain decoding -------------------------------------------------------------------------------


def test_plain_texts_are_transformers_under_llguidances_masks(case_of: CaseOf) -> None:
    case = case_of("qwen3")
    model = reference.load_target(case.built.pair.target_dir)
    json_text = (case.built.pair.target_dir / "tokenizer.json").read_text()
    vocabulary = llguidance.LLTokenizer(json_text, n_vocab=320, eos_token=[318])
    for request, sequence in list(zip(case.requests, case.plain, strict=True))[: len(GRAMMARS)]:
        assert request.sampling == SamplingParams()
        if request.grammar is None:
            continue
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


def test_what_ends_is_what_was_asked_for(case_of: CaseOf) -> None:
    case = case_of("qwen3")
    ended: Counter[Grammar | None] = Counter()
    for request, sequence in zip(case.requests, case.plain, strict=True):
        if request.grammar is None or sequence.finish_reason != "stop":
            assert sequence.finish_reason in ("length", "stop")
            continue
        ended[request.grammar] += 1
        if request.grammar.kind == "json_schema":
            value = json.loads(text_of(case, sequence))
            jsonschema.validate(value, json.loads(request.grammar.text))
    assert ended[GRAMMARS[0]] == len(SAMPLING)
    assert sum(ended.values()) > 2 * len(SAMPLING)


# --- drafts ---------------------------------------------------------------------------------------


def test_any_choice_and_drafts_against_the_grammar(case_of: CaseOf) -> None:
    """Chains and trees with tokens of plain decoding's texts and of others, at random."""
    case = case_of("qwen3")
    target = read_info(case.built.target_engine, "onnxruntime")
    sent = 0

    def rounds(x: VerifyInput) -> RoundOutput:
        nonlocal sent
        output = case.rounds(x)
        for i, (accepted, *_) in enumerate(output.results.tolist()):
            if (x.masks[i] == -1).all() or x.rows[i, 1] > 1:
                continue
            drafts, parents = x.tokens[i, 1 : x.rows[i, 0]], x.parents[i]
            for node, token in enumerate(drafts.tolist()):
                parent = int(parents[node + 1]) if x.parents.shape[1] > 1 else node
                allowed = x.masks[i, parent, token // 32] >> token % 32 & 1
                sent += not allowed
                kept = output.results[i, 3:][:accepted]
                kept = kept if x.parents.shape[1] > 1 else np.arange(1, accepted + 1)
                assert allowed or node + 1 not in kept
        return output

    for seed, slots in enumerate((1, 3, 4)):
        policy = AtRandom(case.built.drafter.spec.block_size - 1, seed)
        answers = {id(r): s.tokens for r, s in zip(case.requests, case.plain, strict=True)}
        guesses, chunk = Guesses(answers, target, seed), (16, 400, 5)[seed]
        decoding = scheduler_of(rounds, policy, guesses, slots=slots, prefill_chunk=chunk)
        choices = decode(decoding, case)
        assert min(choices[kind] for kind in ("plain", "chain", "tree", "lookup", "grammar")) > 5
    assert sent > 100


def test_forced_tokens_are_drafts_for_free(case_of: CaseOf) -> None:
    """Without a drafter, and by a policy that asks it for nothing."""
    case = case_of("qwen3")
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


# --- the JSON Schema Test Suite -------------------------------------------------------------------


def test_answers_under_schemas_of_the_suite_are_valid(built_pair: BuildPair) -> None:
    """Some of its schemas (MIT license), greedy and sampled; with drafts and without alike."""
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
