"""The command line: exit codes, one JSON object, one-paragraph errors, no traceback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import Ran, run
from pairs import make_pair

from dflash_trt import __version__, decoding
from dflash_trt.config import json_schema
from dflash_trt.decoding.lossless import LosslessReport, Mismatch
from dflash_trt.errors import ServerError
from dflash_trt.serving import client, server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, its config, a build of it and a file of prompts."""
    directory = tmp_path_factory.mktemp("home")
    make_pair(directory)
    (directory / "tiny.yaml").write_text(
        "name: tiny\ntarget: {path: target}\ndrafter: {path: drafter}\n"
    )
    lines = ['{"text": "def\u2028f"}', "", '{"ids": [1, 2, 3]}']
    (directory / "prompts.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    done = shell("build", directory / "tiny.yaml", "--output", directory / "built")
    assert done.returncode == 0, done.stderr
    return directory


def shell(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    code = "import sys; from dflash_trt.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(os.fspath, arguments)],  # type: ignore[arg-type]
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=False,
        **options,
    )


def assert_error(result: Ran, code: int, *says: str) -> None:
    assert result.code == code
    assert result.err.count("\n") == 1, "one paragraph"
    assert result.err.startswith("error: ")
    for text in says:
        assert text in result.err


def test_build_says_what_it_made_and_how_to_serve_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = run("build", home / "tiny.yaml")
    assert first.code == 0
    assert (tmp_path / "build" / "tiny" / "manifest.json").is_file()
    assert "serve it: dflash-trt serve build/tiny" in first.out
    assert "building the target engine" in first.err
    second = run("build", home / "tiny.yaml")
    assert second.code == 0
    assert "already built" in second.out
    assert "building" not in second.err


def test_build_json_is_one_object(home: Path, tmp_path: Path) -> None:
    first = json.loads(run("build", home / "tiny.yaml", "--output", tmp_path / "x", "--json").out)
    assert first["built"] is True
    assert first["directory"] == str(tmp_path / "x")
    assert first["files"] == len([f for f in (tmp_path / "x").rglob("*") if f.is_file()]) - 1
    again = json.loads(run("build", home / "tiny.yaml", "--output", tmp_path / "x", "--json").out)
    assert again["built"] is False
    assert (again["files"], again["bytes"]) == (first["files"], first["bytes"])


def test_errors_are_one_paragraph_with_their_exit_code(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert_error(run("build", home / "none.yaml"), 2, "cannot read the config")
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\ntarget: {path: none}\ndrafter: {path: d}\nslots: 3\n")
    assert_error(run("build", bad, "--output", output), 2, "bad.yaml:4", "unknown field 'slots'")
    bad.write_text("name: x\ntarget: {path: none}\ndrafter: {path: d}\n")
    assert_error(run("build", bad, "--output", output), 1, "config.json: No such file")
    assert_error(run("build", home / "tiny.yaml", "--output", home), 1, "not a build")
    assert_error(run("serve", tmp_path), 1, "dflash-trt build")
    assert not output.exists()


def test_errors_are_json_too_when_asked(tmp_path: Path) -> None:
    result = run("build", tmp_path / "none.yaml", "--json")
    assert_error(result, 2, "cannot read the config")
    assert set(json.loads(result.out)["error"]) == {"problem", "fix"}


@pytest.mark.parametrize(
    "arguments", [["build"], ["bild"], ["generate", "x", "--max-tokens", "0"], ["verify", "x"]]
)
def test_bad_usage_exits_2(arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_schema_prints_the_schema() -> None:
    assert json.loads(run("schema").out) == json_schema()


def test_a_damaged_checkpoint_gives_no_traceback(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    weights = tmp_path / "home" / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = shell("build", tmp_path / "home" / "tiny.yaml", "--output", tmp_path / "out")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"drafter/model.safetensors is truncated" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_our_own_faults_are_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("dflash_trt.config.load_config", fail)
    monkeypatch.delenv("DFLASH_TRT_DEBUG", raising=False)
    result = run("build", home / "tiny.yaml")
    assert result.code == 1
    assert result.err.startswith("internal error: KeyError")
    assert result.err.count("\n") == 1
    monkeypatch.setenv("DFLASH_TRT_DEBUG", "1")
    assert "Traceback" in run("build", home / "tiny.yaml").err


def test_an_interrupt_exits_130(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_trt.build.pipeline.build", interrupt)
    assert run("build", home / "tiny.yaml").code == 130


def test_help_does_not_load_heavy_modules(home: Path) -> None:
    code = (
        "import sys; from dflash_trt.cli.main import main; main();"
        "heavy = {'onnxruntime', 'onnx_ir', 'tritonclient', 'numpy', 'pydantic', 'torch'};"
        "sys.exit(len(heavy & sys.modules.keys()))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], env=env, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert b"generate" in done.stdout


def test_serve_hands_on_ports_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(server, "serve", lambda *given: seen.append(given) or 3)
    assert run("serve", tmp_path, "--grpc-port", "9001").code == 3
    [(directory, options)] = seen
    assert (directory, options.http_port, options.grpc_port) == (tmp_path, 8000, 9001)


class FakeClient:
    """Stands for `Client`; the last one's arguments and request are in `asked`."""

    asked: ClassVar[dict[str, Any]] = {}

    def __init__(self, url: str, **options: Any) -> None:
        FakeClient.asked = {"url": url, **options}

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: Any, **options: Any) -> Iterator[Any]:
        FakeClient.asked |= {"prompt": prompt, **options}
        yield from fake_chunks()


def fake_chunks() -> Iterator[Any]:
    yield client.Chunk("HELLO", token_ids=[1, 2, 3, 4], round_tokens=[3], final=None)
    summary = client.Summary(
        finish_reason="length",
        prompt_tokens=2,
        completion_tokens=5,
        rounds=2,
        drafted=14,
        accepted=2,
        acceptance_length=2.0,
        seconds=0.5,
    )
    yield client.Chunk("!", token_ids=[5], round_tokens=[1], final=summary)


def test_generate_streams_text_and_then_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Client", FakeClient)
    result = run("generate", "hello", "--max-tokens", "5")
    assert (result.code, result.out) == (0, "HELLO!\n")
    assert result.err == (
        "tokens committed by each round: 3 1\n5 tokens, 10 tokens/s, 2 rounds, tau 2.00 (length)\n"
    )
    found = json.loads(run("generate", "hello", "--max-tokens", "5", "--json").out)
    assert (found["text"], found["token_ids"]) == ("HELLO!", [1, 2, 3, 4, 5])
    assert found["round_tokens"] == [3, 1]
    assert (found["completion_tokens"], found["rounds"], found["acceptance_length"]) == (5, 2, 2.0)
    assert found["tokens_per_s"] == 10.0


def test_generate_sends_what_its_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Client", FakeClient)
    key, ca = tmp_path / "key", tmp_path / "ca.pem"
    key.write_text("k" * 16 + "\n")
    sampling = ("--seed", 7, "--temperature", 0.5)
    more = ("--chat", "--tls-ca", ca, "--key-file", key)
    assert run("generate", "hi", "--url", "host:1", *sampling, *more).code == 0
    assert FakeClient.asked == {
        "url": "host:1",
        "tls": client.Tls(root_certificate=ca),
        "headers": {"triton-grpc-protocol-inference-key": "k" * 16},
        "prompt": [{"role": "user", "content": "hi"}],
        "max_tokens": 128,
        "temperature": 0.5,
        "seed": 7,
    }
    assert run("generate", "hi").code == 0
    named = ("tls", "headers", "seed")
    assert [FakeClient.asked[name] for name in named] == [None] * 3, "the server's defaults"
    assert_error(run("generate", "hi", "--key-file", tmp_path), 1, "cannot read", "--key-file")
    key.write_bytes(b"\xff")
    assert_error(run("generate", "hi", "--key-file", key), 1, "holds no key")


def test_generate_says_that_an_address_of_http_is_none_of_grpc() -> None:
    for url in ("http://127.0.0.1:8000", "https://host/v1"):
        assert_error(run("generate", "x", "--url", url), 1, url, "gRPC", "HOST:PORT")


def test_version_short_help_and_completion() -> None:
    assert run("--version").out == f"dflash-trt {__version__}\n"
    for command in ((), ("build",), ("generate",), ("bench",), ("bench", "matrix")):
        assert run(*command, "-h").out == run(*command, "--help").out != ""
    words = {"_DFLASH_TRT_COMPLETE": "complete_bash", "COMP_WORDS": "dflash-trt gen"}
    done = subprocess.run(
        [Path(sys.executable).with_name("dflash-trt")],
        env=os.environ | words | {"COMP_CWORD": "1"},
        capture_output=True,
        check=False,
    )
    assert done.stdout.split() == [b"generate"]


def test_generate_reads_utf8_from_stdin_and_refuses_the_rest() -> None:
    not_utf8 = shell("generate", "-", input=b"caf\xe9")
    assert not_utf8.returncode == 1
    assert not_utf8.stderr == b"error: the prompt is not UTF-8 text. Encode the prompt as UTF-8.\n"
    argument = shell(b"generate", b"caf\xe9")
    assert argument.returncode == 1
    assert argument.stderr == not_utf8.stderr
    assert_error(run("generate", ""), 1, "the prompt is empty")


def test_generate_without_a_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Iterator[Any]:
        raise ServerError("nothing answers at 127.0.0.1:8001", "Start it with `dflash-trt serve`")

    monkeypatch.setattr(FakeClient, "stream", fail)
    monkeypatch.setattr(client, "Client", FakeClient)
    assert_error(run("generate", "x"), 1, "nothing answers", "dflash-trt serve")


def test_verify_compares_dflash_with_the_target_alone(home: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs.jsonl"
    arguments = ("verify", home / "built", "--prompts", home / "prompts.jsonl", "--max-tokens", 12)
    result = run(*arguments, "--json", "--outputs", outputs)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["identical"], found["total"], found["first_mismatch"]) == (2, 2, None)
    assert 1 <= found["tau"] <= 8
    assert found["together"] == 4
    assert found["plain_tokens_per_s"] > 0
    assert found["speedup"] == pytest.approx(
        found["dflash_tokens_per_s"] / found["plain_tokens_per_s"]
    )
    lines = [json.loads(line)["ids"] for line in outputs.read_text().splitlines()]
    assert [len(ids) for ids in lines] == [12, 12]
    assert "2/2 identical, one and 4 at a time" in run(*arguments).out
    long = run(*arguments[:-1], 5000)
    assert_error(long, 1, "at most 0 fit beside --max-tokens")


def test_verify_exits_1_and_shows_the_first_mismatch(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mismatch = Mismatch(prompt=1, position=4, expected=7, got=9, together=True)
    report = LosslessReport(1, 2, 4, 2.5, [1.0, 0.5], 1.5, 90.0, 60.0, [[1], [2]], mismatch, [4, 5])
    monkeypatch.setattr(decoding, "check_lossless", lambda *_: report)
    arguments = ("verify", home / "built", "--prompts", home / "prompts.jsonl", "--max-tokens", 5)
    result = run(*arguments, "--json")
    assert result.code == 1
    assert json.loads(result.out)["first_mismatch"] == {
        "prompt": 1,
        "position": 4,
        "expected": 7,
        "got": 9,
        "together": True,
    }
    assert "prompt 1, decoded with others, differs first at token 4" in result.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "Expecting"),
        ("[1, 2]", "not an object with"),
        ('{"ids": [1, "a"]}', "not an object with"),
        ('{"messages": [5]}', "not an object with"),
        ('{"messages": []}', "empty"),
        ('{"ids": [320]}', "outside 0 to 319"),
        (json.dumps({"ids": [1] * 508}), "at most 507"),
    ],
)
def test_verify_names_the_line_of_a_bad_prompt(
    home: Path, tmp_path: Path, line: str, says: str
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"ids": [1]}\n' + line + "\n")
    result = run("verify", home / "built", "--prompts", prompts, "--max-tokens", 5)
    assert_error(result, 1, f"{prompts}:2: ", says)


def test_verify_refuses_what_is_no_build_and_empty_prompt_files(home: Path, tmp_path: Path) -> None:
    prompts = home / "prompts.jsonl"
    assert_error(run("verify", tmp_path, "--prompts", prompts, "--max-tokens", 5), 1, "not a")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    result = run("verify", home / "built", "--prompts", empty, "--max-tokens", 5)
    assert_error(result, 1, "holds no prompt")
    absent = run("verify", home / "built", "--prompts", tmp_path / "no", "--max-tokens", 5)
    assert_error(absent, 1, "cannot read")
