"""Chat templates: found and rendered as `transformers` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.serving.chat import load_chat_template, parse_messages

CHATML = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{{ m['content'] | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TOOLS = """{% if tools %}{{ tools | tojson(indent=2) }}
{% endif %}{%- for m in messages -%}
    {% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    [{{ m.role }}] {% generation %}{{ m.content }}{% endgeneration %}
{%- endfor %}{{ '<think>' if enable_thinking | default(false) else '' }}{{ eos_token }}"""
MESSAGES = [
    {"role": "system", "content": " Be <brief> & 'kind' "},
    {"role": "user", "content": "hé\n🙂?"},
]


def _tokenizer(directory: Path, template: str | None, **config: Any) -> Path:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    ).save_pretrained(directory)
    if config:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


@pytest.mark.parametrize("template", [CHATML, TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "more", [{}, {"tools": [{"name": "<f>", "x": [1, "é"]}], "enable_thinking": True}], ids=str
)
def test_rendered_as_transformers_does(
    template: str, prompt: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    directory = _tokenizer(tmp_path, template)
    render = load_chat_template(directory)
    assert render is not None
    ours = render(messages=MESSAGES, add_generation_prompt=prompt, **more)
    assert ours == AutoTokenizer.from_pretrained(directory).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=prompt, **more
    )


def test_where_templates_are(tmp_path: Path) -> None:
    def rendered(directory: Path) -> str | None:
        render = load_chat_template(directory)
        return render(messages=[]) if render else None

    assert rendered(_tokenizer(tmp_path / "none", None)) is None
    inline = _tokenizer(tmp_path / "inline", None, chat_template="inline{{ eos_token }}")
    assert rendered(inline) == "inline</s>"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(_tokenizer(tmp_path / "several", None, chat_template=several)) == "d"
    (inline / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert rendered(inline) == "legacy"
    (inline / "chat_template.jinja").write_text("file")
    assert rendered(inline) == "file"
    (inline / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="not valid"):
        load_chat_template(inline)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].x.y }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves(template: str, tmp_path: Path) -> None:
    render = load_chat_template(_tokenizer(tmp_path, template))
    assert render is not None
    with pytest.raises(RequestError, match="chat template refuses"):
        render(messages=[{"role": "user"}])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"role": "user"}', "not a JSON list"),
        (b"[]", "empty"),
        (b'["hello"]', "not a message"),
        (b'[{"content": "x"}]', "not a message"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_messages(text: bytes, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        parse_messages(text)
