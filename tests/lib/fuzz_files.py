"""Mutated files of every kind that a user or a build can hand us, through whatever reads them.

`python tests/lib/fuzz_files.py COUNT SEED` makes a pair and its builds, spoils one file a case and
prints as JSON what came of them. `unexpected` has every exception that is not our own, every read
that took longer than `SECONDS`, and every death of the process, which starts again after it. Cases
have `LIMIT` bytes of address space beside what the process takes when it starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_configs
import fuzz_weights
import numpy as np
from builds import build_pair, config_of
from google.protobuf import text_format
from mutations import spoil
from safetensors.numpy import save_file
from signing_keys import write_keys
from tritonclient.grpc.model_config_pb2 import ModelConfig

from dflash_trt.bench import load_asked
from dflash_trt.build import onnxruntime, tensorrt_llm
from dflash_trt.build.built import inspect_built
from dflash_trt.build.manifest import check_build, differences, read_manifest, speculation_of
from dflash_trt.build.run import build
from dflash_trt.build.settings import Settings
from dflash_trt.build.signing import check_signed, sign
from dflash_trt.chat.render import load_chat_template, load_encoding
from dflash_trt.checkpoints import Located, Weights, inspect, load_tokenizer
from dflash_trt.checkpoints.gguf import read_header
from dflash_trt.checkpoints.gguf_directory import as_directory
from dflash_trt.cli.report import show, show_built
from dflash_trt.config import BuildConfig, load_config
from dflash_trt.decoding.speculation import kept_profiles
from dflash_trt.errors import DflashError
from dflash_trt.files import read_text
from dflash_trt.prompts import read_prompts
from dflash_trt.serving.server.process import find_repository

SECONDS = 10.0
LIMIT = 1 << 30
BUILT_AGAIN = 0.02  # share of the cases of checkpoints that are built, too
SPECIAL = 0.12  # share of all cases that are no regular file, or none of its kind
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'b' %}{{ raise_exception('n') }}
{% endif %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}{% set x = namespace(n=0) %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ '%0*d' % (3, 1) }}{{ 'x' * 3 }}"""
WORDS = (  # of templates, YAML and protobuf text
    *("{% for i in range(99999) %}", "{% endfor %}", "{% break %}", "{{ 9 ** (9 ** 9) }}", "{%"),
    *("{{ '%0*d' % (10 ** 9, 1) }}", "{{ 'x' * 10 ** 9 }}", "}}", "{% macro m() %}{{ m() }}"),
    *("{% endmacro %}", "{{ messages }}", "{{ m.content.format }}", "{% set m = m %}", "((((("),
    *("{{ ''.__class__ }}", "&a [*a]", "*a", "!!bool x", "!!timestamp 1-99-99", "!!binary x"),
    *("? [a]", "<<: *a", "~", "1:" * 300 + "1.5", "{}", "[]", "- ", "\n  ", "'", '"', "0o9"),
    *("1e999", "\u2028", "\0", "%s", 'string_value: "x"', "parameters [", "#", "9" * 5000),
    *('{ key: "slots" value: { string_value: "-1" } }', "[" * 3000, "{a: " * 300),
)
NAMES = ("extra", ".extra", "model.py", "x.json", "__pycache__")
ADDED = ("file", "link", "link to a folder", "folder")
SPECIALS = ("pipe", "device", "folder", "hole", "link", "pointer", "empty", "gone", "loop")
SHARDS = ("model-0.safetensors", "model-1.safetensors")
GGUF_HEADER = 8864  # bytes of it in the file that `prepare` writes
Spoil = Callable[[bytes, random.Random], bytes]


def special(file: Path, chance: random.Random) -> None:
    how = chance.choice(SPECIALS)
    file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    elif how == "device":
        file.symlink_to(chance.choice(["/dev/zero", "/dev/tty", "/proc/self/mem", "/dev/stdin"]))
    elif how == "folder":
        file.mkdir()
    elif how == "hole":
        file.touch()
        os.truncate(file, chance.choice([1, 1 << 20, 1 << 26, 1 << 28]))
    elif how == "link":
        file.symlink_to(chance.choice(["/etc/passwd", "/", "nowhere", "../target/config.json"]))
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif how == "empty":
        file.write_bytes(b"")


def spoilt_json(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.2:
        return spoil(data, chance)
    value = json.loads(data)
    for _ in range(chance.choice([1, 1, 2, 4])):
        value = fuzz_configs.mutate(value, chance) if isinstance(value, dict | list) else value
    return fuzz_configs.text_of(value, chance)


def spoilt_text(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice([1, 1, 2, 3])):
        at = chance.randrange(len(data) + 1)
        if chance.random() < 0.6:
            data = data[:at] + chance.choice(WORDS).encode() + data[at:]
        else:
            data = spoil(data, chance)
    return data


def spoilt_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = spoilt_json(lines[at], chance)
    return b"\n".join(lines)


def spoilt_gguf(data: bytes, chance: random.Random) -> bytes:
    """Mostly lengths, counts, types and offsets: the header has them at its begin and its end."""
    if chance.random() < 0.3:
        return spoil(data, chance)
    raw = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4])):
        at = chance.randrange(chance.choice([300, 3000, GGUF_HEADER]))
        at = chance.choice([at, GGUF_HEADER - at])
        size = chance.choice([1, 4, 8])
        value = chance.choice([0, 1, 2, 8, 9, 31, 255, 1 << 16, (1 << 31) - 1, (1 << 64) - 1])
        raw[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(raw)


class Fuzzer:
    """Files below `home`, each restored after its case."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.pair = [home / "target", home / "drafter"]
        self.encode = load_encoding(home / "sound")
        checkpoint, built = self.checkpoint, self.built
        self.kinds: dict[str, tuple[Spoil, Callable[[], object]]] = {
            "target/config.json": (spoilt_json, checkpoint),
            "drafter/config.json": (spoilt_json, checkpoint),
            "target/generation_config.json": (spoilt_json, checkpoint),
            "target/tokenizer.json": (spoilt_json, self.tokenizer),
            "target/tokenizer_config.json": (spoilt_json, self.tokenizer),
            "target/chat_template.jinja": (spoilt_text, self.tokenizer),
            "target/chat_template.json": (spoilt_json, self.tokenizer),
            "target/added_tokens.json": (spoilt_json, checkpoint),
            "target/model.safetensors": (spoil, checkpoint),
            "target.gguf": (spoilt_gguf, self.gguf),
            "drafter/model.safetensors": (spoil, checkpoint),
            "shards/model.safetensors.index.json": (spoilt_json, self.shards),
            "pair.yaml": (spoilt_text, lambda: load_config(home / "pair.yaml")),
            "prompts.jsonl": (spoilt_lines, self.prompts),
            "asked.jsonl": (spoilt_lines, self.prompts),
            "built/manifest.json": (spoilt_json, built),
            "built/engines/target/engine.json": (spoilt_json, built),
            "built/engines/drafter/engine.json": (spoilt_json, built),
            "built/engines/costs.json": (spoilt_json, self.costs),
            "built/engines/target/model.onnx": (spoil, built),
            "built/engines/target/model.onnx.data": (spoil, built),
            "built/tokenizer/tokenizer.json": (spoilt_json, built),
            "built/model_repository/dflash/config.pbtxt": (spoilt_text, built),
            "linked/engines/target/engine.json": (spoilt_json, self.linked),
        }
        self.optional = {"target/chat_template.jinja", "target/chat_template.json"}
        self.optional |= {"target/added_tokens.json"}
        for name in self.optional:  # they are there in their own cases only
            (home / name).rename(home / (name + ".kept"))
        self.came: dict[str, Counter[str]] = {}
        self.unexpected: list[str] = []
        self.slowest = (0.0, "")
        self.chance, self.sound = random.Random(0), b""
        for name, (_, probe) in self.kinds.items():  # what is sound is taken, or nothing is tested
            self.name, self.file = name, home / name
            probe()

    def case(self, number: int, seed: int) -> None:
        chance = random.Random(f"{seed} {number}")
        if number % 16 == 1:
            self.attempt(f"{number} added", lambda: self.added(chance))
            return
        if number % 4 == 0:  # made from nothing: headers and quantised tensors
            self.attempt(f"{number} weights", lambda: self.weights(chance))
            return
        name = chance.choice(sorted(self.kinds))

        def change(file: Path, sound: bytes) -> None:
            if chance.random() < SPECIAL:
                special(file, chance)
            else:
                file.write_bytes(self.kinds[name][0](sound, chance))

        self.spoilt(f"{number} {name}", name, chance, change)

    def spoilt(
        self, what: str, name: str, chance: random.Random, change: Callable[[Path, bytes], None]
    ) -> None:
        """One attempt with a file that `change` wrote, given its path and what is sound."""
        file = self.home / name
        if name in self.optional:
            shutil.copyfile(self.home / (name + ".kept"), file)
        self.chance, self.file, self.name, before = chance, file, name, file.read_bytes()
        self.sound = before
        change(file, before)
        try:
            self.attempt(what, self.kinds[name][1])
        finally:
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                file.unlink(missing_ok=True)
            if name not in self.optional:
                file.write_bytes(before)

    def attempt(self, what: str, probe: Callable[[], object]) -> None:
        """One probe in all its parts; a refusal by us is what is expected."""
        started = time.monotonic()
        outcome = "passed"
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
                probe()
        except DflashError as error:
            outcome = "refused"
            str(error).encode("utf-8", "backslashreplace")
        except BaseException:
            outcome = "unexpected"
            self.unexpected.append(f"{what}: {traceback.format_exc()[-1500:]}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.came.setdefault(what.split(" ", 1)[1], Counter())[outcome] += 1
        self.slowest = max(self.slowest, (time.monotonic() - started, what))

    def each(self, *probes: Callable[[], object]) -> None:
        """Every probe in a time of its own, though one refuses; then the first refusal."""
        refusals = []
        for probe in probes:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                probe()
            except DflashError as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]

    def weights(self, chance: random.Random) -> None:
        made = chance.choice(fuzz_weights.MAKERS)(chance)
        folder = self.home / "weights"
        folder.mkdir()
        try:
            for name, data in made.items():
                (folder / name).write_bytes(data)
            weights = Weights(folder, {"quantization_config": fuzz_weights.QUANTISATIONS[0]})
            for name in weights.names:
                weights.read(name)
        finally:
            shutil.rmtree(folder)

    def added(self, chance: random.Random) -> None:
        """What no manifest names is refused, wherever it lies and whatever it is called."""
        built, how = self.home / "built", chance.choice(ADDED)
        folders = [built, *(x for x in sorted(built.rglob("*")) if x.is_dir())]
        free = [x / name for x in folders for name in NAMES if not (x / name).exists()]
        extra = chance.choice(free)
        if how == "folder":
            extra.mkdir()
            (extra / chance.choice(["1", "model.py"])).touch()
        elif how == "file":
            extra.touch()
        else:
            extra.symlink_to("/" if how == "link to a folder" else built / "manifest.json")
        try:
            self.each(
                lambda: refused(lambda: check_build(built)),
                lambda: refused(lambda: check_signed(built, None, self.home / "key.pub")),
            )
        finally:
            if how == "folder":
                shutil.rmtree(extra)
            else:
                extra.unlink()

    def config(self, **engine: object) -> BuildConfig:
        return config_of(self.home, engine=engine)

    def prepare(self) -> None:
        at = [Located(model, None) for model in self.pair]
        quiet = lambda *_: None  # noqa: E731
        bundle = self.config(kind="tensorrt_llm", gpus=1)
        self.each(
            lambda: onnxruntime.prepare(self.config(), at[0], at[1], quiet),
            lambda: tensorrt_llm.prepare(bundle, at[0], at[1], quiet),
        )

    def checkpoint(self) -> None:
        def inspected() -> None:
            report = inspect(*self.pair)
            json.dumps(report)
            show(report)

        self.each(inspected, self.prepare)
        if self.chance.random() < BUILT_AGAIN:
            output = self.home / "again"
            try:
                build(self.config(), output, lambda *_: None)
            finally:
                shutil.rmtree(output, ignore_errors=True)

    def tokenizer(self) -> None:
        def encoded() -> None:
            encode = load_encoding(self.home / "target")
            encode([{"role": "user", "content": "Hello"}])
            encode("def f():")

        self.each(encoded, *[self.checkpoint] * (self.chance.random() < 0.1))

    def shards(self) -> None:
        """Both shards have every tensor, with a value of their own: the index says whose counts."""
        weights = Weights(self.home / "shards")
        places = json.loads(self.file.read_bytes())["weight_map"]
        for name in weights.names:
            value = weights.read(name)
            if name in places:
                own = SHARDS.index(places[name]) + 1
                assert (value == own).all(), "of another shard than the index says"

    def gguf(self) -> None:
        at = as_directory(self.file)
        tensors = read_header(self.file).tensors.values()
        assert sum(each.n_bytes for each in tensors) <= self.file.stat().st_size, "they overlap"
        encode = load_encoding(at)

        def weights() -> None:
            weights = Weights(at)
            for name in weights.names:
                weights.read(name)
                if weights.block_format(name):
                    list(weights.blocks(name, 512))

        self.each(
            lambda: show(inspect(at, self.pair[1])),
            lambda: onnxruntime.prepare(
                self.config(), Located(at, None), Located(self.pair[1], None), lambda *_: None
            ),
            weights,
            lambda: encode([{"role": "user", "content": "Hello 12"}]),
        )

    def prompts(self) -> None:
        self.each(
            lambda: read_prompts(self.file, self.encode, vocab_size=320, longest=64),
            lambda: load_asked(str(self.file), 9) if self.name == "asked.jsonl" else None,
        )

    def costs(self) -> None:
        kept_profiles(self.file.parent)
        show_built(inspect_built(self.home / "built"))

    def built(self) -> None:
        built = self.home / "built"

        def checked() -> None:
            manifest = read_manifest(built)
            speculation_of(manifest)
            other = self.file.name != "manifest.json"
            if other:
                found = differences(built, manifest, "full")
                name = self.name.removeprefix("built/")
                assert found.changed + found.missing + found.added == [name] * self.changed()
            check_build(built)
            assert not (other and self.changed()), "a changed file passes"

        def tokens() -> None:
            load_tokenizer(built / "tokenizer")
            load_chat_template(built / "tokenizer")

        def signed() -> None:
            check_signed(built, None, self.home / "key.pub")
            assert not self.changed(), "a changed file passes the signature"

        self.each(
            checked,
            signed,
            lambda: show_built(inspect_built(built)),
            lambda: find_repository(built),
            self.parameters,
            tokens,
        )

    def changed(self) -> bool:
        """Whether the file is not as it was; before the first case all are."""
        same = False
        with contextlib.suppress(OSError):  # what cannot be read is another file
            same = self.file.is_file() and self.file.read_bytes() == self.sound
        return bool(self.sound) and not same

    def linked(self) -> None:
        linked = self.home / "linked"
        self.each(lambda: check_build(linked), lambda: find_repository(linked))

    def parameters(self) -> None:
        """Triton parses the text; what it hands on is ours to read."""
        text, config = self.home / "built/model_repository/dflash/config.pbtxt", ModelConfig()
        with contextlib.suppress(OSError, ValueError, text_format.ParseError):
            said = text_format.Parse(read_text(text), config).parameters
            Settings.from_parameters({key: value.string_value for key, value in said.items()})


def prepare(home: Path) -> None:
    """The pair, its builds, and sound files beside them."""
    import ggufs  # noqa: PLC0415
    from pairs import make_pair  # noqa: PLC0415  (it loads torch)

    make_pair(home)
    for name, weights in (("built", "copy"), ("linked", "link")):
        build_pair(home, home / name, weights=weights)
    target = home / "target"
    shutil.copytree(target, home / "sound")
    ggufs.write(home / "target.gguf", target, ggufs.Kind.Q4_1)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    (target / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (target / "added_tokens.json").write_text('{"<x>": 3}')
    (home / "pair.yaml").write_text(
        "name: tiny\ntarget: {path: target}\ndrafter: {path: drafter}\n"
        "engine: {kind: onnxruntime, threads: 2}\nspeculation: {policy: adaptive, tree: true}\n"
        "serving:\n  slots: 4\n  max_seq_len: 64\n"
    )
    asked = '{"text": "def f():"}\n{"messages": [{"role": "user", "content": "a"}]}\n'
    (home / "asked.jsonl").write_text(asked)
    (home / "prompts.jsonl").write_text(asked + '{"ids": [1, 2]}\n')
    write_keys(home)
    sign(home / "built", home / "key.pem")
    costs = {"contexts": [64, 128], "rows": [1, 2], "widths": [1, 4]}
    costs |= {"verify_seconds": [[[0.1, 0.2]] * 2] * 2, "draft_seconds": [[0.1, 0.1]] * 2}
    kept = json.dumps({"a machine; ensemble, 2 threads": costs})
    (home / "built/engines/costs.json").write_text(kept)
    shards = home / "shards"
    shards.mkdir()
    places = dict(zip(("norm.weight", "head.weight"), SHARDS, strict=True))
    for number, shard in enumerate(SHARDS, 1):
        tensors = {name: np.full((2, 4), number, np.float32) for name in places}
        save_file(tensors, shards / shard)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def refused(check: Callable[[], object]) -> None:
    """Raises the refusal."""
    check()
    raise AssertionError("what was added passes")


def hung(_number: int, _frame: object) -> None:
    raise BaseException(f"longer than {SECONDS} s")


def work(home: Path, count: int, seed: int, first: int, report: Path) -> None:
    """Cases from `first` on; the report is written anew before each, for a process that dies."""
    signal.signal(signal.SIGALRM, hung)
    fuzzer = Fuzzer(home)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with report.open("w") as stream:
        for number in range(first, count):
            print(number, file=stream, flush=True)
            fuzzer.case(number, seed)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) >> 10
        found = {"came": fuzzer.came, "unexpected": fuzzer.unexpected}
        print(json.dumps({**found, "slowest": fuzzer.slowest, "grown_mib": grown}), file=stream)


def main(count: int, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    came: Counter[str] = Counter()
    unexpected: list[str] = []
    slowest, grown, first = (0.0, ""), 0, 0
    with tempfile.TemporaryDirectory() as name:
        made = Path(name, "made")
        made.mkdir()
        subprocess.run([sys.executable, __file__, "prepare", made], check=True)
        while first < count:
            home, report = Path(name, "home"), Path(name, "report")
            shutil.rmtree(home, ignore_errors=True)
            shutil.copytree(made, home, symlinks=True)
            shutil.rmtree(home / "linked")  # its links are to the pair that it was made from
            shutil.copytree(made / "linked", home / "linked", symlinks=True)
            words = [home, count, seed, first, report]
            done = subprocess.run(
                [sys.executable, __file__, "work", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # reports of sound files
                stderr=subprocess.PIPE,
            )
            if not report.exists():
                raise RuntimeError(done.stderr.decode(errors="replace"))
            *_, last = report.read_text().splitlines()
            if done.returncode == 0:
                found = json.loads(last)
                for kind, outcomes in found["came"].items():
                    came += Counter({f"{kind} {how}": n for how, n in outcomes.items()})
                unexpected += found["unexpected"]
                slowest, grown = tuple(found["slowest"]), found["grown_mib"]
                break
            died = int(last)
            said = done.stderr.decode(errors="replace")[-500:]
            unexpected.append(f"{died}: the process ended with {done.returncode}: {said}")
            first = died + 1
    seconds = time.monotonic() - started
    return {
        "came": dict(sorted(came.items())),
        "unexpected": unexpected,
        "slowest": slowest,
        "grown_mib": grown,
        "cases_per_s": round(count / seconds, 1),
    }


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    elif sys.argv[1] == "work":
        home, *numbers, report = sys.argv[2:]
        work(Path(home), *map(int, numbers), Path(report))
    else:
        print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2])), indent=1))
