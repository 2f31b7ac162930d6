"""Chat templates: found and rendered as `transformers` does."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.chat.chat_model import chat_template, end_of_turn, turn_end_ids
from dflash_trt.chat.render import load_chat_template
from dflash_trt.checkpoints import NO_DRAFTER, Model, NotKnown, Pair, copy_tokenizer, eos_token_ids
from dflash_trt.errors import CheckpointError, RequestError

CHATML = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{{ m['content'] | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TOOLS = """{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson(true, 4) }}
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


def loaded(directory: Path) -> Any:
    render = load_chat_template(directory)
    assert render is not None
    return render


def target(directory: Path) -> Pair:
    return Pair(Model("target", directory, {"vocab_size": 9, "eos_token_id": 2}), NO_DRAFTER)


@pytest.mark.parametrize("template", [CHATML, TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "more", [{}, {"tools": [{"name": "<f>", "x": [1, "é"]}], "enable_thinking": True}], ids=str
)
def test_rendered_as_transformers_does(
    template: str, prompt: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    directory = _tokenizer(tmp_path, template)
    ours = loaded(directory)(messages=MESSAGES, add_generation_prompt=prompt, **more)
    assert ours == AutoTokenizer.from_pretrained(directory).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=prompt, **more
    )


def test_a_template_file_of_older_models(tmp_path: Path) -> None:
    directory = _tokenizer(tmp_path, None, chat_template="inline")
    (directory / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert loaded(directory)(messages=[]) == "legacy"


NAMED = {"default": "d", "tool_use": "t", "rag": "r"}
AS_LIST = [{"name": name, "template": text} for name, text in NAMED.items()]
WHERE: dict[str, tuple[Any, dict[str, str]]] = {
    "a list": (AS_LIST, {}),
    "a dict": (NAMED, {}),
    "files": (None, {"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}),
    "a file over the config": ("c", {"chat_template.jinja": "d"}),
    "files over the config's": (AS_LIST, {"chat_template.jinja": "d",
                                          "additional_chat_templates/rag.jinja": "r"}),
    "a file beside the config": ("d", {"additional_chat_templates/tool_use.jinja": "t"}),
    "tool_use alone": ([AS_LIST[1]], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", WHERE)
@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
def test_the_template_that_transformers_takes(case: str, tools: Any, tmp_path: Path) -> None:
    config, files = WHERE[case]
    directory = _tokenizer(tmp_path, None, **({"chat_template": config} if config else {}))
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    render = loaded(directory)
    try:
        expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
            MESSAGES, tokenize=False, tools=tools
        )
    except ValueError:  # no default: the only one is taken
        expected = files.get("chat_template.jinja", "d" if isinstance(config, str) else "t")
    assert render(messages=MESSAGES, tools=tools) == expected
    copy_tokenizer(directory, tmp_path / "copy")
    copy = loaded(tmp_path / "copy" / "tokenizer")
    assert copy(messages=MESSAGES, tools=tools) == expected


TOKENS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the config": ({"bos_token": "<s>",
                    "sep_token": {"__type": "AddedToken", "content": "</s>"}}, {}),
    "the map": ({"bos_token": "x"}, {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}),
    "the config that lists tokens": ({"bos_token": "<s>", "added_tokens_decoder": {}},
                                     {"bos_token": "x"}),
    "names of its own": ({"image_token": "<s>", "add_bos_token": True,
                          "extra_special_tokens": {"eoi": "</s>", "boi_token": "<s>"}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENS)
def test_special_tokens_that_transformers_hands_to_a_template(case: str, tmp_path: Path) -> None:
    names = ("bos_token", "eos_token", "sep_token", "image_token", "eoi", "boi_token")
    source = "|".join(f"{{{{ {name} }}}}" for name in names) + "{{ documents is none }}"
    directory = _tokenizer(tmp_path, None)
    config, tokens = TOKENS[case]
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind | config))
    (directory / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert loaded(directory)(messages=MESSAGES) == expected


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
        ("{% for i in range(99) %}{% for j in range(99999) %}{% break %}{% endfor %}{% endfor %}",
         "steps"),
        ("{% macro m() %}{% for j in range(99999) %}{% break %}{% endfor %}{% endmacro %}"
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
        chat_template(target(directory))
    render = loaded(directory)
    for _ in range(2):
        with pytest.raises(RequestError, match=rf"makes more than \d+ {limit}"):
            render(messages=[{"role": "user"}])
        assert render(messages=[{"role": "system"}]) == "well"


def test_limits_leave_usual_products_alone(tmp_path: Path) -> None:
    source = "{{ '-' * 3 }}{{ 3 * 2.5 }}{{ 2 ** 10 }}{{ '%05d|%s' % (7, 'a') }}{{ 10 % 3 }}"
    render = loaded(_tokenizer(tmp_path, source))
    assert render(messages=[]) == "---7.5102400007|a1"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].x.y }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content }}",  # half a character
    ],
)
def test_a_template_reaches_nothing_but_what_it_is_given(template: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "\ud800"}]
    render = loaded(_tokenizer(tmp_path, None, chat_template=template))
    with pytest.raises(RequestError, match="chat template refuses the messages"):
        render(messages=messages)
    assert messages == [{"role": "user", "content": "\ud800"}]


def test_a_template_that_refuses_a_plain_message_is_a_warning(tmp_path: Path) -> None:
    directory = _tokenizer(tmp_path, "{{ raise_exception('no system prompt') }}")
    (directory / "config.json").write_text("{}")
    with pytest.raises(NotKnown, match="no system prompt"):
        end_of_turn.look(target(directory))
    finding = chat_template(target(directory))
    assert (finding.result, "no system prompt" in finding.found) == ("warning", True)


@pytest.mark.parametrize(
    ("closing", "result"),
    [
        ("</s>", "passed"),  # the tokenizer's own end
        ("<|im_end|>\n", "note"),
        ("\n", "passed"),  # no token
        ("{% if not loop.last %}</s><s>{% endif %}", "passed"),
        ("{% if loop.last %}</s>{% else %}<|im_end|>{% endif %}", "passed"),
    ],
)
def test_what_ends_a_turn_ends_a_text(closing: str, result: str, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + closing + "{% endfor %}"
    directory = _tokenizer(tmp_path, source)
    (directory / "config.json").write_text("{}")
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.save(str(file))
    finding = end_of_turn(target(directory))
    assert finding.result == result
    assert result == "passed" or "'<|im_end|>' after an answer" in finding.found


@pytest.mark.parametrize("generation", [None, 3, [3]])
@pytest.mark.parametrize("config", [None, 4])
@pytest.mark.parametrize("tokenizer_end", [None, "</s>"])
@pytest.mark.parametrize("closing", ["", "\n", "<|im_end|>\n", "</s>"])
def test_a_text_ends_where_any_of_a_checkpoint_says(
    tmp_path: Path,
    generation: int | list[int] | None,
    config: int | None,
    tokenizer_end: str | None,
    closing: str,
) -> None:
    """As vLLM and transformers together: config's ids, the tokenizer's end, and the turn's."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + closing + "{% endfor %}"
    directory = _tokenizer(tmp_path, source, eos_token=tokenizer_end)
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["</s>", "<|im_end|>"])
    tokenizer.save(str(file))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    size = tokenizer.get_vocab_size() + 10
    ends = {*eos_token_ids(directory, size), *turn_end_ids(directory, size)}
    expected = {3} if generation else set()
    expected |= {4} if config else set()
    texts = [text for text in (tokenizer_end, closing.strip()) if text]
    assert ends == expected | {tokenizer.token_to_id(text) for text in texts}
