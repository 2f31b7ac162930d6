"""Whatever is wrong in a file that a user or a build hands us: an answer, or a sentence of ours.

`SPOILT_EXAMPLES=2000` spoils more than `make test` does.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings

from dflash_trt.bench import load_prompts
from dflash_trt.builder import onnxruntime, tensorrt_llm
from dflash_trt.builder.manifest import check_build, read_manifest, speculation_of
from dflash_trt.builder.signing import check_signed, sign
from dflash_trt.chat.render import load_encoding
from dflash_trt.checkpoints import Located
from dflash_trt.checks import inspect
from dflash_trt.cli.show import show
from dflash_trt.config import load_config
from dflash_trt.errors import DflashError
from dflash_trt.prompts import read_prompts
from dflash_trt.weights import Weights
from dflash_trt.weights.gguf import as_directory
from tests.support import gguf_drafters, ggufs
from tests.support.builds import config_of, quiet
from tests.support.signing_keys import write_keys
from tests.support.strategies import DICE, EACH_ONCE, spoil, spoil_json

pytestmark = pytest.mark.models

EXAMPLES = int(os.environ.get("SPOILT_EXAMPLES", "15"))
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'b' %}{{ raise_exception('n') }}
{% endif %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}{% set x = namespace(n=0) %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ '%0*d' % (3, 1) }}{{ 'x' * 3 }}"""
WORDS = (  # of templates, YAML and protobuf text
    *("{% for i in range(99999) %}", "{% endfor %}", "{% break %}", "{{ 9 ** (9 ** 9) }}", "{%"),
    *("{{ '%0*d' % (10 ** 9, 1) }}", "{{ 'x' * 10 ** 9 }}", "}}", "{% macro m() %}{{ m() }}"),
    *("{% endmacro %}", "{{ m.content.format }}", "((((("),
    *("{{ ''.__class__ }}", "&a [*a]", "*a", "!!bool x", "!!timestamp 1-99-99", "!!binary x"),
    *("? [a]", "<<: *a", "~", "1:" * 300 + "1.5", "{}", "- ", "\n  ", "'", '"', "0o9", "1e999"),
    *("\u2028", "\0", "%s", 'string_value: "x"', "parameters [", "#", "9" * 5000, "[" * 3000),
    *('{ key: "slots" value: { string_value: "-1" } }', "{a: " * 300),
)
MESSAGE = [{"role": "user", "content": "Hello 12"}]
HANGS, MEMORY = 120, 1 << 30  # seconds of a file; bytes of address space for all of them
many = settings(EACH_ONCE, max_examples=EXAMPLES, derandomize="SPOILT_EXAMPLES" not in os.environ)


def spoil_text(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    word = dice.choice(WORDS).encode()
    return data[:at] + word + data[at:] if dice.random() < 0.6 else spoil(data, dice)


def spoil_lines(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines()
    at = dice.randrange(len(lines))
    lines[at] = spoil_json(lines[at], dice)
    return b"\n".join(lines)


def spoil_gguf(data: bytes, dice: random.Random) -> bytes:
    """Spoil mostly the header's lengths, counts, types and offsets."""
    if dice.random() < 0.3:
        return spoil(data, dice)
    raw, at, size = bytearray(data), dice.randrange(9000), dice.choice([1, 4, 8])
    value = dice.choice([0, 1, 2, 8, 9, 31, 255, 1 << 16, (1 << 31) - 1, (1 << 64) - 1])
    raw[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(raw)


@pytest.fixture(scope="module", autouse=True)
def limited(home: Path) -> Iterator[None]:
    """Limit memory: what a file says of its size must not be believed."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise BaseException(f"longer than {HANGS} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def home(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("spoilt") / "home"
    shutil.copytree(original, home)
    target = home / "target"
    ggufs.write(home / "target.gguf", target, ggufs.Kind.Q4_1)
    gguf_drafters.write(home / "drafter.gguf", home / "drafter", target, ggufs.Kind.Q8_0)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    (target / "added_tokens.json").write_text('{"<x>": 3}')
    (home / "pair.yaml").write_text(
        "name: tiny\ntarget: {path: target}\ndrafter: {path: drafter}\n"
        "engine: {kind: onnxruntime, threads: 2}\nspeculation: {policy: adaptive, lookup: true}\n"
        "serving:\n  slots: 4\n  max_seq_len: 64\n"
    )
    asked = '{"text": "def f():"}\n{"messages": [{"role": "user", "content": "a"}]}\n'
    (home / "asked.jsonl").write_text(asked)
    (home / "prompts.jsonl").write_text(asked + '{"ids": [1, 2]}\n')
    write_keys(home)
    sign(home / "built", home / "key.pem")
    return home


def inspected(home: Path, target: str) -> None:
    report = inspect(as_directory(home / target), home / "drafter")
    json.dumps(report)
    show(report)


def prepared(home: Path, target: str) -> None:
    at = Located(as_directory(home / target), None), Located(home / "drafter", None)
    onnxruntime.prepare(config_of(home, engine={"kind": "onnxruntime"}), *at, quiet)
    if target == "target":
        bundle = config_of(home, engine={"kind": "tensorrt_llm", "gpus": 1})
        tensorrt_llm.prepare(bundle, *at, quiet)


def drafter_prepared(home: Path) -> None:
    drafter = as_directory(home / "drafter.gguf")
    show(inspect(home / "target", drafter))
    at = Located(home / "target", None), Located(drafter, None)
    onnxruntime.prepare(config_of(home, engine={"kind": "onnxruntime"}), *at, quiet)
    weights = Weights(drafter)
    for name in weights.names:
        weights.read(name)


def encoded(home: Path, target: str) -> None:
    encode = load_encoding(as_directory(home / target))
    encode(MESSAGE)
    encode("def f():")


def weights_read(home: Path, target: str) -> None:
    weights = Weights(as_directory(home / target))
    for name in weights.names:
        weights.read(name)
        if weights.form(name):
            list(weights.blocks(name, 512))


def prompts_read(home: Path) -> None:
    read_prompts(home / "prompts.jsonl", lambda _: [1], vocab_size=320, longest=64)


def refused(check: Callable[[], object]) -> None:
    with pytest.raises(DflashError):
        check()


READERS = (inspected, prepared, encoded, weights_read)
PAIR = tuple(partial(reader, target="target") for reader in READERS)
GGUF = tuple(partial(reader, target="target.gguf") for reader in READERS)
Spoil = Callable[[bytes, random.Random], bytes]
KINDS: dict[str, tuple[Spoil, tuple[Callable[[Path], object], ...]]] = {
    "target/config.json": (spoil_json, PAIR),
    "drafter/config.json": (spoil_json, PAIR),
    "target/generation_config.json": (spoil_json, PAIR),
    "target/tokenizer.json": (spoil_json, PAIR),
    "target/tokenizer_config.json": (spoil_json, PAIR),
    "target/chat_template.jinja": (spoil_text, PAIR),
    "target/added_tokens.json": (spoil_json, PAIR),
    "target/model.safetensors": (spoil, PAIR),
    "drafter/model.safetensors": (spoil, PAIR),
    "target.gguf": (spoil_gguf, GGUF),
    "drafter.gguf": (spoil_gguf, (drafter_prepared,)),
    "pair.yaml": (spoil_text, (lambda home: load_config(home / "pair.yaml"),)),
    "prompts.jsonl": (spoil_lines, (prompts_read,)),
    "asked.jsonl": (spoil_lines, (lambda home: load_prompts(str(home / "asked.jsonl"), 9),)),
    "built/model.sig": (
        spoil_json,
        (lambda home: check_signed(home / "built", None, home / "key.pub"),),
    ),
    "built/manifest.json": (
        spoil_json,
        (lambda home: speculation_of(read_manifest(home / "built")),),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_spoilt_file_gives_an_answer_of_ours(home: Path, name: str) -> None:
    spoil_file, readers = KINDS[name]
    sound = (home / name).read_bytes()

    @many
    @given(DICE)
    def one(dice: random.Random) -> None:
        data = spoil_file(sound, dice)
        if data == sound:
            return
        (home / name).write_bytes(data)
        for read in readers:
            with (
                in_time(),
                contextlib.suppress(DflashError),
                contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")),
            ):
                read(home)

    try:
        one()
    finally:
        (home / name).write_bytes(sound)


@pytest.mark.parametrize("how", ["file", "link", "link to a folder", "folder"])
def test_what_no_manifest_names_is_refused(home: Path, how: str) -> None:
    built = home / "built"
    for folder in [built, *(each for each in sorted(built.rglob("*")) if each.is_dir())]:
        for name in ("extra", ".extra", "model.py", "__pycache__"):
            extra = folder / name
            if extra.exists():
                continue
            if how == "folder":
                extra.mkdir()
                (extra / "1").touch()
            elif how == "file":
                extra.touch()
            else:
                extra.symlink_to("/" if how == "link to a folder" else built / "manifest.json")
            refused(lambda: check_build(built))
            refused(lambda: check_signed(built, None, home / "key.pub"))
            shutil.rmtree(extra) if how == "folder" else extra.unlink()
    check_signed(built, None, home / "key.pub")
