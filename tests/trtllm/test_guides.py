"""What a text has to follow, as TensorRT-LLM is told it; who cannot be guided is told by name."""

import json

import pytest

from dflash_trt.decoding import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.serving.model.llm import guide

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("grammar", "backend", "expected"),
    [
        (Grammar("json_schema", SCHEMA), "xgrammar", {"json": SCHEMA}),
        (Grammar("json_schema", SCHEMA), "llguidance", {"json": SCHEMA}),
        (Grammar("regex", "(Paris|London)"), "xgrammar", {"regex": "(Paris|London)"}),
        (Grammar("lark", 'start: "a"'), "llguidance", {"grammar": 'start: "a"'}),
    ],
)
def test_a_grammar_is_one_guide(grammar: Grammar, backend: str, expected: dict[str, str]) -> None:
    assert guide(grammar, backend, channels=grammar.kind == "lark") == expected


@pytest.mark.parametrize(
    ("grammar", "content"),
    [
        (
            Grammar("json_schema", SCHEMA),
            {"type": "json_schema", "json_schema": json.loads(SCHEMA)},
        ),
        (Grammar("regex", "[a-z]+"), {"type": "regex", "pattern": "[a-z]+"}),
    ],
)
def test_a_model_with_channels_is_guided_in_the_last_one(
    grammar: Grammar, content: dict[str, object]
) -> None:
    """Upstream's `trtllm-serve` does so for gpt-oss."""
    found = guide(grammar, "xgrammar", channels=True)
    assert found.keys() == {"structural_tag"}
    assert json.loads(found["structural_tag"]) == {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": [FINAL],
            "tags": [{"begin": FINAL, "content": content, "end": ""}],
            "stop_after_first": True,
        },
    }


@pytest.mark.parametrize(
    ("grammar", "backend", "words"),
    [
        (Grammar("regex", "a"), None, "built without guided decoding"),
        (Grammar("lark", 'start: "a"'), "xgrammar", "which this server cannot read"),
        (Grammar("regex", "a"), "llguidance", "channels, and llguidance cannot wait"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    grammar: Grammar, backend: str | None, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        guide(grammar, backend, channels=True)
    assert "guided_decoding_backend" in str(refused.value)
