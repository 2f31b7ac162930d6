"""Answers that follow a grammar, from the real Triton: valid, and alike with drafts and without."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
from tokenizers import Tokenizer

from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports

PROMPT, WAIT = "def main():", 60.0
SCHEMA = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 12},
        "number_of_arguments": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["method", "function"]},
    },
    "required": ["function_name", "number_of_arguments", "kind"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "function", "schema": SCHEMA}}
ASKED: list[tuple[dict[str, Any], str]] = [  # and a regex that the text has to match
    ({"response_format": JSON_SCHEMA}, r"\{.*\}"),
    ({"guided_json": SCHEMA}, r"\{.*\}"),
    ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
    ({"guided_choice": ["return a.b", "return (c)\n", "é+*"]}, r"return a\.b|return \(c\)\n|é\+\*"),
    ({"guided_grammar": 'start: "x = " NUMBER\nNUMBER: /[0-9]{1,3}/'}, "x = [0-9]{1,3}"),
]


def test_texts_follow_what_was_asked_with_drafts_and_without(triton: Ports) -> None:
    cases = [
        (asked, matches, {"temperature": temperature, "seed": 5})
        for asked, matches in [*ASKED, ({}, r"(.|\n)*")]
        for temperature in (0.0, 0.8)
    ]
    with Client(f"127.0.0.1:{triton.grpc}") as client, ThreadPoolExecutor(8) as pool:
        asks = [
            pool.submit(
                client.generate, PROMPT, max_tokens=80, drafting=drafting, **asked, **sampling
            )
            for asked, _, sampling in cases
            for drafting in (True, False)
        ]
        answers = [ask.result().choices[0] for ask in asks]
    forced = 0
    for (asked, matches, _), fast, alone in zip(cases, answers[::2], answers[1::2], strict=True):
        assert fast.text == alone.text
        reason = "stop" if asked else "length"
        assert fast.finish_reason == alone.finish_reason == reason
        assert re.fullmatch(matches, fast.text), (asked, fast.text)
        if "{" in matches[:3]:
            jsonschema.validate(json.loads(fast.text), SCHEMA)
        assert alone.drafted == 0
        forced += fast.token_sources.count("grammar")
    assert forced > 20


def test_choices_have_grammars_of_their_own(triton: Ports) -> None:
    with Client(f"127.0.0.1:{triton.grpc}") as client:
        answer = client.generate(PROMPT, n=4, temperature=1.0, seed=1, guided_json=SCHEMA)
    texts = [choice.text for choice in answer.choices]
    assert len({*texts}) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_end_of_text_and_min_tokens_give_way_to_the_grammar(triton: Ports) -> None:
    with Client(f"127.0.0.1:{triton.grpc}") as client:
        for options in ({"ignore_eos": True}, {"min_tokens": 60}):
            answer = client.generate(PROMPT, max_tokens=80, guided_json=SCHEMA, **options)
            assert answer.choices[0].finish_reason == "stop"
            jsonschema.validate(json.loads(answer.choices[0].text), SCHEMA)


def test_logit_bias(triton: Ports, chat_built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chat_built / "tokenizer" / "tokenizer.json"))
    (token,) = tokenizer.encode("x", add_special_tokens=False).ids
    with Client(f"127.0.0.1:{triton.grpc}") as client:
        for drafting in (True, False):
            biased = client.generate(
                PROMPT, max_tokens=9, drafting=drafting, logit_bias={str(token): 100.0}
            )
            assert biased.choices[0].token_ids == [token] * 9
        plain = client.generate(PROMPT, max_tokens=9).choices[0].token_ids
        banned = client.generate(PROMPT, max_tokens=9, logit_bias={str(plain[0]): -100})
        assert plain[0] not in banned.choices[0].token_ids


def test_openais_response_format(api: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    asked: dict[str, Any] = {"model": "pycode", "messages": messages, "temperature": 0}
    for fields in (
        {"response_format": JSON_SCHEMA},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    ):
        for stream in (False, True):
            answer = api.chat.completions.create(**asked, **fields, stream=stream)
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                text = answer.choices[0].message.content
                assert answer.choices[0].finish_reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)
    more = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = api.completions.create(model="pycode", prompt=PROMPT, max_tokens=80, extra_body=more)
    assert answer.choices[0].text in ("yes", "no")
