"""`info`, `diff`, the digest that names a build, and what is kept beside it."""

import hashlib
import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from dflash_trt.builder import identity
from dflash_trt.builder.identity import (
    Record,
    about_build,
    checkpoint_name,
    difference,
    write_record,
)
from dflash_trt.builder.manifest import (
    MANIFEST,
    MEASURED,
    build_digest,
    check_build,
    read_manifest,
)
from dflash_trt.builder.pipeline import build
from dflash_trt.builder.program import _commit, program
from dflash_trt.builder.signing import sign, verify_signature
from dflash_trt.errors import BuildError, RequestError
from tests.support.builds import config_of, contents, quiet
from tests.support.commands import run
from tests.support.signing_keys import write_keys

TEXT = "name: tiny  # as it was written\n"
RECORD = Record(
    build="",
    measured="2026-11-28T00:00:00+00:00",
    program="dflash-trt 0.1.0",
    machine="a CPU",
    acceptance={"pycode": {"dflash": 3.25}},
)


@pytest.fixture
def built(pair: Path) -> Path:
    shutil.rmtree(pair / "built")
    build(config_of(pair), pair / "built", quiet, TEXT)
    return pair / "built"


def test_a_build_is_named_by_its_manifest(built: Path) -> None:
    digest = hashlib.sha256((built / MANIFEST).read_bytes()).hexdigest()
    about = about_build(built)
    assert about["digest"] == build_digest(built) == digest
    assert (built / "config.yaml").read_text() == TEXT
    assert about["config_file"] == "config.yaml"
    assert about["signature"] is None
    assert about["acceptance"] is None
    assert about["made_by_this_program"]
    assert about["files"] == len(contents(built)) - 1
    code, out, err = run("info", built)
    assert (code, err) == (0, "")
    assert out.startswith(f"tiny {digest[:12]}\n")
    for role in ("target", "drafter"):
        assert checkpoint_name(about["checkpoints"][role]) in out


def test_the_digest_is_in_the_deployment_and_changes_with_the_build(pair: Path) -> None:
    texts = []
    for name, drafts in (("a", None), ("b", 3)):
        config = config_of(pair, speculation={"draft_tokens": drafts})
        build(config, pair / name, quiet)
        file = pair / name / "deploy" / "kubernetes" / "deployment.yaml"
        texts.append(file.read_text())
        digest = build_digest(pair / name)
        assert f"dflash-trt/build: sha256:{digest}" in texts[-1]
        assert f"image: tiny:{digest[:12]}" in texts[-1]
        check_build(pair / name, "full")
        file.write_text(texts[-1].replace("runAsNonRoot: true", "runAsNonRoot: None"))
        with pytest.raises(BuildError, match=r"deployment.yaml \(changed\)"):
            check_build(pair / name, "full")
    assert texts[0] != texts[1]


def test_another_text_of_the_config_is_another_build(pair: Path, built: Path) -> None:
    assert not build(config_of(pair), built, quiet, TEXT).built
    assert build(config_of(pair), built, quiet, TEXT + "# why\n").built


def test_the_program_s_commit_builds_nothing_again(pair: Path, built: Path) -> None:
    manifest = read_manifest(built)
    manifest["dflash_trt"]["commit"] = "0" * 40
    digest = build_digest(built)
    (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for file in (built / "deploy").rglob("*"):
        if file.is_file():
            text = file.read_text().replace(digest, build_digest(built))
            file.write_text(text.replace(digest[:12], build_digest(built)[:12]))
    assert not build(config_of(pair), built, quiet, TEXT).built


def test_what_was_measured_breaks_nothing(pair: Path, built: Path, tmp_path: Path) -> None:
    write_keys(tmp_path)
    sign(built, tmp_path / "key.pem")
    write_record(built, Record(**asdict(RECORD) | {"build": build_digest(built)}))
    verify_signature(built, tmp_path / "key.pub")
    assert run("check", built, "--key", tmp_path / "key.pub").code == 0
    assert not build(config_of(pair), built, quiet, TEXT).built
    out = run("info", built).out
    assert "3.25 tokens a round, pycode, dflash" in out
    assert (
        f"by the key sha256:{hashlib.sha256((tmp_path / 'key.pub').read_bytes()).hexdigest()}"
        in out
    )
    assert "of this build" in out
    # signed anew, it is still no part of it
    sign(built, tmp_path / "key.pem")
    (built / MEASURED).unlink()
    verify_signature(built, tmp_path / "key.pub")
    write_record(built, RECORD)  # of another build
    assert about_build(built)["acceptance"] is None
    (built / MEASURED).write_text("{}")
    assert "measured.json is damaged" in about_build(built)["acceptance"]["problem"]
    assert "acceptance  " in run("info", built).out


def test_bench_records_what_it_measured(pair: Path, built: Path) -> None:
    prompts = pair / "prompts.jsonl"
    prompts.write_text('{"ids": [1, 2, 3]}\n')
    options = ["--prompts", prompts, "--repeats", "1", "--max-tokens", "8"]
    assert run("bench", "engine", built, *options, "--record").code == 0
    acceptance = about_build(built)["acceptance"]["acceptance"]
    assert acceptance.keys() == {"prompts.jsonl"}
    assert all(tau >= 1 for tau in acceptance["prompts.jsonl"].values())
    (built / "tokenizer" / "tokenizer.json").write_text("{}")
    changed = run("bench", "engine", built, *options)
    assert (changed.code, "tokenizer.json (changed)" in changed.err) == (1, True)


def test_diff_says_what_changed_in_a_few_lines(pair: Path, built: Path) -> None:
    assert difference(built, built) == []
    assert run("diff", built, built)[:2] == (0, "the same build\n")
    build(config_of(pair, serving={"slots": 2, "prefill_chunk": 64}), pair / "new", quiet, "x: 1\n")
    code, out, _ = run("diff", built, pair / "new")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == f"digest: {build_digest(built)[:12]} -> {build_digest(pair / 'new')[:12]}"
    assert "config.serving.slots: 4 -> 2" in lines
    assert "config.serving.prefill_chunk: 256 -> 64" in lines
    assert "engines/target/engine.json: changed" in lines
    assert not [line for line in lines if "program" in line or "target:" in line]
    assert len(lines) <= 12


def test_another_drafter_is_a_line(pair: Path, built: Path) -> None:
    card = pair / "drafter" / "README.md"
    card.write_text("another")
    build(config_of(pair), pair / "new", quiet, TEXT)
    lines = difference(built, pair / "new")
    assert [line.partition(":")[0] for line in lines] == ["digest", "drafter"]


def test_a_config_written_in_other_words_is_a_line(pair: Path, built: Path) -> None:
    build(config_of(pair), pair / "new", quiet, TEXT + "# a comment\n")
    lines = difference(built, pair / "new")
    assert [line.partition(":")[0] for line in lines] == ["digest", "config.yaml"]


def test_a_build_of_another_program_is_told(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = type(program())("0.2.0", "f" * 64, "c" * 40)
    monkeypatch.setattr(identity, "program", lambda: other)
    assert not about_build(built)["made_by_this_program"]
    assert "not the program that says this" in run("info", built).out


def test_a_wrong_question_is_refused(tmp_path: Path) -> None:
    for words in (["info"], ["info", tmp_path, "--url", "http://127.0.0.1:9"]):
        code, _, err = run(*words)
        assert (code, "give a build or --url" in err) == (1, True)
    code, _, err = run("info", tmp_path)
    assert (code, "is not a directory that dflash-trt built" in err) == (1, True)
    code, _, err = run("info", "--url", "http://127.0.0.1:9")
    assert (code, "does not answer" in err) == (1, True)
    assert "is no address" in run("info", "--url", "localhost:8000").err


def test_a_checkout_s_commit(tmp_path: Path) -> None:
    """The last one that changed the code, and none if the code differs from it."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    package = tmp_path / "dflash_trt"
    package.mkdir()
    (tmp_path / "model_repository").mkdir()
    (package / "a.py").write_text("1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    assert _commit(package) == commit
    (tmp_path / "page.md").write_text("x")
    git("add", ".")
    git("commit", "--quiet", "--message", "two")
    assert _commit(package) == commit
    (package / "a.py").write_text("2\n")
    assert _commit(package) is None


@pytest.mark.parametrize("words", [["check"], ["sign"]])
def test_a_wrong_key_is_named(built: Path, tmp_path: Path, words: list[str]) -> None:
    code, _, err = run(*words, built, "--key", tmp_path / "none.pem")
    assert code == 1
    assert f"cannot read the key {tmp_path / 'none.pem'}: No such file" in err
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415

    key = rsa.generate_private_key(65537, 2048)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "rsa.pem").write_bytes(public if words == ["check"] else private)
    if words == ["check"]:
        write_keys(tmp_path)
        sign(built, tmp_path / "key.pem")
    code, _, err = run(*words, built, "--key", tmp_path / "rsa.pem")
    assert code == 1
    assert "of another kind (RSA" in err
    assert "openssl ecparam" in err


def test_sign_prints_json(built: Path, tmp_path: Path) -> None:
    write_keys(tmp_path)
    code, out, _ = run("sign", built, "--key", tmp_path / "key.pem", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["digest"] == build_digest(built)
    assert found["key"] == hashlib.sha256((tmp_path / "key.pub").read_bytes()).hexdigest()
    (built / "model.sig").write_text("{}")
    assert "model.sig is not a signature of this build" in run("info", built).out


def test_a_key_file_of_a_client(tmp_path: Path) -> None:
    from dflash_trt.serving.remote import client_options  # noqa: PLC0415

    (tmp_path / "key").write_text("0123456789abcdef\n")
    options = client_options("http://localhost:8000/v1", tmp_path / "key")
    assert options["headers"] == {"Authorization": "Bearer 0123456789abcdef"}
    assert options["base_url"] == "http://localhost:8000"
    assert not options["trust_env"]  # no proxy of the environment
    assert client_options("https://a.example", None)["trust_env"]
    with pytest.raises(RequestError, match="holds no key"):
        client_options("http://localhost:8000", tmp_path / "none")
