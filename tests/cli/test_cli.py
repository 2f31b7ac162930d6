"""The command line: exit codes, one JSON object, one-paragraph errors, no traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from dflash_trt import __version__, decoding
from dflash_trt.builder.program import program as this_program
from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.decoding.lossless import LosslessReport, Mismatch
from tests.standins.triton_grpc import part, parts, stand_in
from tests.support.commands import Ran, run
from tests.support.pairs import make_pair


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
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

    monkeypatch.setattr("dflash_trt.builder.pipeline.build", interrupt)
    assert run("build", home / "tiny.yaml").code == 130


ANSWER = parts(
    part(text_output=["HELLO"], token_ids=[1, 2, 3, 4], round_tokens=[3], finish_reason=[""]),
    part(
        text_output=["!"],
        token_ids=[5],
        round_tokens=[1],
        finish_reason=["length"],
        completion_tokens=[5],
        rounds=[2],
        acceptance_length=[2.0],
    ),
)


def test_generate_streams_text_and_then_its_figures() -> None:
    with stand_in(ANSWER) as server:
        command = ("generate", "hello", "--max-tokens", "5", "--url", server.address)
        result, as_json = run(*command), run(*command, "--json")
    assert (result.code, result.out) == (0, "HELLO!\n")
    rounds, figures = result.err.splitlines()
    assert rounds == "tokens committed by each round: 3 1"
    assert re.fullmatch(r"5 tokens, [\d.]+ tokens/s, 2 rounds, tau 2\.00 \(length\)", figures)
    found = json.loads(as_json.out)
    assert (found["text"], found["token_ids"]) == ("HELLO!", [1, 2, 3, 4, 5])
    assert found["round_tokens"] == [3, 1]
    assert (found["completion_tokens"], found["rounds"], found["acceptance_length"]) == (5, 2, 2.0)
    assert found["tokens_per_s"] > 0


def test_generate_sends_what_its_options_say(tmp_path: Path) -> None:
    key, pem, authority = tmp_path / "key", tmp_path / "ca.pem", trustme.CA()
    key.write_text("k" * 16 + "\n")
    authority.cert_pem.write_to_path(str(pem))
    issued = authority.issue_cert("127.0.0.1")
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    credentials = grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])
    sampling = ("--seed", 7, "--temperature", 0.5)
    more = ("--chat", "--tls-ca", pem, "--key-file", key)
    with stand_in(ANSWER, credentials=credentials) as server:
        assert run("generate", "hi", "--url", server.address, *sampling, *more).code == 0
        [sent] = server.requests
        assert json.loads(sent["messages"]) == [{"role": "user", "content": "hi"}]
        assert (sent["max_tokens"], sent["temperature"], sent["seed"]) == (128, 0.5, 7)
        assert server.metadata[0]["triton-grpc-protocol-inference-key"] == "k" * 16
    with stand_in(ANSWER) as server:
        assert run("generate", "hi", "--url", server.address).code == 0
        [sent] = server.requests
        assert sent["text_input"] == "hi"
        assert "seed" not in sent, "the server's default"
    assert_error(run("generate", "hi", "--key-file", tmp_path), 1, str(tmp_path))


def test_version_and_short_help() -> None:
    assert run("--version").out == f"{this_program()}\n"
    assert re.match(rf"dflash-trt {__version__}, code [0-9a-f]{{12}}", str(this_program()))
    assert run("build", "-h").out == run("build", "--help").out != ""


def test_generate_reads_utf8_from_stdin_and_refuses_the_rest() -> None:
    not_utf8 = shell("generate", "-", input=b"caf\xe9")
    assert not_utf8.returncode == 1
    assert not_utf8.stderr == b"error: the prompt is not UTF-8 text. Encode the prompt as UTF-8.\n"
    argument = shell(b"generate", b"caf\xe9")
    assert argument.returncode == 1
    assert argument.stderr == not_utf8.stderr
    assert_error(run("generate", ""), 1, "the prompt is empty")


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
    speedup = found["dflash_tokens_per_s"] / found["plain_tokens_per_s"]
    assert found["speedup"] == pytest.approx(speedup)
    lines = [json.loads(line) for line in outputs.read_text(encoding="utf-8").splitlines()]
    assert [len(line["ids"]) for line in lines] == [12, 12]
    tokenizer = load_tokenizer(home / "built" / "tokenizer")
    for line in lines:
        assert line["text"] == tokenizer.decode(line["ids"], skip_special_tokens=False)
    nowhere = run(*arguments, "--outputs", tmp_path / "none" / "x.jsonl")
    assert_error(nowhere, 1, "its folder is not there")
    assert "2/2 identical, one and 4 at a time" in run(*arguments).out
    assert_error(run(*arguments[:-1], 5000), 1, "at most 0 fit beside --max-tokens")


def test_onnx_runtime_reports_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = shell("verify", home / "built", "--prompts", home / "prompts.jsonl", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.rglob("onnxruntime*")]


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
        ('{"ids": [1, "a"]}', "not an object with"),
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
