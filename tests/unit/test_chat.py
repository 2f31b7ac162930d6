"""Chat templates: found and rendered as `transformers` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.chat.render import load_chat_template, try_chat_template
from dflash_trt.errors import CheckpointError, RequestError

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


LOADING = {
    "nameless": ([{"name": "default"}], None),  # transformers finds none either
    "no text": ({"a": 1}, "is no text"),
    "list of numbers": ([{"name": "default", "template": 5}], "is no text"),
    "unhashable names": ([{"name": [], "template": "a"}, 5], None),
    "break outside a loop": ("{% break %}", "is not valid"),
    "deep": ("{{" + "(" * 5000 + ")" * 5000 + "}}", "is not valid"),
    "surrogates": ("\ud800", "is not valid"),
}


@pytest.mark.parametrize("case", LOADING)
def test_a_template_that_cannot_be_loaded(case: str, tmp_path: Path) -> None:
    template, problem = LOADING[case]
    directory = _tokenizer(tmp_path, None, chat_template=template)
    if problem is None:
        assert load_chat_template(directory) is None
        return
    with pytest.raises(CheckpointError, match=problem):
        load_chat_template(directory)


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro m() %}{% for j in range(99999) %}{% endfor %}{% endmacro %}"
         "{% for i in range(99) %}{{ m() }}{% endfor %}", "steps"),
        ("{{ '%0*d' % (10 ** 9, 1) }}", "characters"),
        ("{{ '%.1000000000f' % 1 }}", "characters"),
        ("{{ 'x' * (100 * 2 ** 20) }}", "items"),
        ("{{ 10 ** 10 * (messages | string) }}", "items"),
        ("{{ 9 ** (9 ** 9) }}", "bits"),
        ("{% set x = 'x' * 2 ** 20 %}{% for i in range(99) %}{{ x }}{% endfor %}", "characters"),
    ],
)  # fmt: skip
def test_a_template_is_limited_in_what_it_makes(template: str, limit: str, tmp_path: Path) -> None:
    source = "{% if messages[0].role == 'user' %}" + template + "{% else %}well{% endif %}"
    directory = _tokenizer(tmp_path, source)
    with pytest.raises(CheckpointError, match=rf"makes more than \d+ {limit}"):
        try_chat_template(directory)
    render = load_chat_template(directory)
    assert render is not None
    for _ in range(2):
        with pytest.raises(RequestError, match=rf"makes more than \d+ {limit}"):
            render(messages=[{"role": "user"}])
        assert render(messages=[{"role": "system"}]) == "well"


def test_limits_leave_usual_products_alone(tmp_path: Path) -> None:
    source = "{{ '-' * 3 }}{{ 3 * 2.5 }}{{ 2 ** 10 }}{{ '%05d|%s' % (7, 'a') }}{{ 10 % 3 }}"
    render = load_chat_template(_tokenizer(tmp_path, source))
    assert render is not None
    assert render(messages=[]) == "---7.5102400007|a1"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content }}",  # half a character
    ],
)
def test_a_template_reaches_nothing_but_what_it_is_given(template: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "\ud800"}]
    directory = _tokenizer(tmp_path, None, chat_template=template)
    render = load_chat_template(directory)
    assert render is not None
    with pytest.raises(RequestError, match="refuses the messages"):
        render(messages=messages)
    assert messages == [{"role": "user", "content": "\ud800"}]


def test_a_template_that_refuses_a_plain_message_is_a_warning(tmp_path: Path) -> None:
    directory = _tokenizer(tmp_path, "{{ raise_exception('no system prompt') }}")
    (finding,) = try_chat_template(directory)
    assert (finding.result, "no system prompt" in finding.found) == ("warning", True)
