"""Chat templates: found and rendered as `transformers` does."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dflash_trt.serving.server.reaper import command_line
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.chat.render import load_chat_template, parse_messages, try_chat_template
from dflash_trt.chat.templates import MODULE, send
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


LOADING = {
    "nameless": ([{"name": "default"}], None),  # transformers finds none either
    "no text": ({"a": 1}, "is no text"),
    "list of numbers": ([{"name": "default", "template": 5}], "is no text"),
    "unhashable names": ([{"name": [], "template": "a"}, 5], None),
    "break outside a loop": ("{% break %}", "is not valid"),
    "deep": ("{{" + "(" * 5000 + ")" * 5000 + "}}", "is not valid"),
    "endless": ("{{ 9 ** (9 ** 9) }}", r"not valid \(it takes more than 2 s\)"),
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
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "2 s"),
        ("{{ '%0*d' % (10 ** 9, 1) }}", "512 MiB"),
        ("{{ 'x' * (100 * 2 ** 20) }}", "512 MiB"),
        ("{{ messages | string * 10 ** 10 }}", "512 MiB"),
    ],
)
def test_a_template_is_limited_in_time_and_memory(
    template: str, limit: str, tmp_path: Path
) -> None:
    """The next one finds the process started again."""
    source = "{% if messages[0].role == 'user' %}" + template + "{% else %}well{% endif %}"
    directory = _tokenizer(tmp_path, source)
    with pytest.raises(CheckpointError, match=f"takes more than {limit}"):
        try_chat_template(directory)
    render = load_chat_template(directory)
    assert render is not None
    for _ in range(2):
        with pytest.raises(RequestError, match=f"takes more than {limit}"):
            render(messages=[{"role": "user"}])
        assert render(messages=[{"role": "system"}]) == "well"


def test_a_template_that_refuses_a_plain_message_is_a_warning(tmp_path: Path) -> None:
    directory = _tokenizer(tmp_path, "{{ raise_exception('no system prompt') }}")
    (finding,) = try_chat_template(directory)
    assert (finding.result, "no system prompt" in finding.found) == ("warning", True)


def test_the_process_of_a_template_ends_with_its_owner(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from dflash_trt.chat.render import load_chat_template
render = load_chat_template(Path({str(_tokenizer(tmp_path, CHATML))!r}))
print(Path(f'/proc/{{os.getpid()}}/task/{{os.getpid()}}/children').read_text(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    children = [int(word) for word in done.stdout.split()]
    assert children
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


def test_the_process_of_a_template_says_nothing_when_its_owner_is_gone() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
    )
    with ours, theirs:
        send(ours, b"well")
    assert process.communicate(timeout=60) == (None, b"")
    assert process.returncode == 0


def test_the_process_of_a_template_has_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TRT_INTERNAL_KEY", "secret")
    before = {*children()}
    render = load_chat_template(_tokenizer(tmp_path, CHATML))
    (pid,) = {*children()} - before
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert render is not None  # alive until here


def children() -> list[int]:
    own = Path("/proc/self/task") / Path("/proc/thread-self").readlink().name / "children"
    return [int(word) for word in own.read_text().split()]


def alive(pid: int) -> bool:
    return "dflash_trt.chat.template_process" in command_line(pid)
