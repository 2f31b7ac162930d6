"""Checkpoints on the Hub, fetched by `huggingface_hub` from a stand-in that speaks its API."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http, close_session

from dflash_trt.checkpoints import load_drafter, locate
from dflash_trt.config import Source
from dflash_trt.errors import CheckpointError
from tests.support.hub import TOKEN, Hub, Repository, running_hub
from tests.support.pairs import make_pair

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
Steps = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    make_pair(directory)
    target = directory / "target"
    (target / "chat_template.jinja").write_text("{{ messages }}")
    (target / "original").mkdir()
    for name in (
        *("pytorch_model.bin", "training_args.bin", "modeling_custom.py", "notes.md", "README.md"),
        *("consolidated.safetensors", "original/model.safetensors", "original/config.json"),
    ):
        (target / name).write_bytes(name.encode())
    return directory


@pytest.fixture
def hub(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        for role in ("target", "drafter"):
            hub.repositories[f"org/{role}"] = Repository(original / role, {"main": NEW, "v1": OLD})
        # what HF_ENDPOINT and HF_HUB_CACHE set when the library is imported
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
        close_session()


def fetch(hub: str = "org/target", revision: str = "main") -> tuple[Path, str | None, Steps]:
    steps: Steps = []
    source = Source(hub=hub, revision=revision)
    return *locate(source, "target", lambda *step: steps.append(step)), steps


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert locate(Source(path=tmp_path), "target", pytest.fail) == (tmp_path, None)


@pytest.mark.parametrize(("revision", "commit"), [("main", NEW), ("v1", OLD), (OLD, OLD)])
def test_what_is_read_is_fetched_and_nothing_else(
    hub: Hub, original: Path, revision: str, commit: str
) -> None:
    directory, found, steps = fetch(revision=revision)
    assert found == commit
    names = {file.relative_to(directory).as_posix() for file in directory.rglob("*")}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"),
    }
    for name in names:
        assert (directory / name).read_bytes() == (original / "target" / name).read_bytes()
    asked = [line for line in hub.log if "/resolve/" in line]
    assert all(f"/resolve/{commit}/" in line for line in asked)
    assert not any(word in line for line in asked for word in (".bin", ".py", "notes", "original"))
    assert steps[0] == ("fetching org/target", 0, 7)
    assert steps[-1] == ("fetching org/target", 7, 7)
    hub.log.clear()
    assert fetch(revision=commit)[:2] == (directory, commit)
    assert hub.log == []  # a commit does not change


def test_a_branch_is_followed(hub: Hub) -> None:
    assert fetch()[1] == NEW
    hub.repositories["org/target"].branches["main"] = OLD
    assert fetch()[1] == OLD


def test_a_gated_model_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/target"].gated = True
    says = f"Accept the terms on {hub.url}/org/target.*HF_TOKEN"
    with pytest.raises(CheckpointError, match=says):
        fetch()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch()[1] == NEW


def test_what_is_not_there_is_named(hub: Hub) -> None:
    for name, revision in (("none", "main"), ("none", OLD), ("target", "v9"), ("target", "f" * 40)):
        says = rf"cannot fetch the target org/{name} at '{revision}'.*target\.hub"
        with pytest.raises(CheckpointError, match=says):
            fetch(f"org/{name}", revision)


def test_a_mask_embedding_beside_a_drafter_is_seen(
    hub: Hub, tmp_path: Path, original: Path
) -> None:
    drafter = Path(shutil.copytree(original / "drafter", tmp_path / "drafter"))
    (drafter / "mask_embedding.pt").write_bytes(b"a pickle, which is never loaded")
    hub.repositories["org/masked"] = Repository(drafter, {"main": NEW})
    with pytest.raises(CheckpointError, match="an embedding of its own for masks"):
        load_drafter(fetch("org/masked")[0])


@pytest.mark.parametrize("revision", ["main", OLD])
def test_offline_the_cache_must_hold_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE.*hf download"):
        fetch(revision=revision)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    directory, commit, _ = fetch(revision=revision)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.log.clear()
    assert fetch(revision=revision)[:2] == (directory, commit)
    assert hub.log == []
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        fetch(revision=revision)


@pytest.mark.parametrize("revision", ["main", OLD])
def test_a_hub_that_fails_or_is_away(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.setattr(_http, "time", Mock())  # its retries wait for no one
    hub.failing = ("/", 503)
    with pytest.raises(CheckpointError, match=rf"cannot fetch .* from {hub.url}: .*503"):
        fetch(revision=revision)
    hub.failing = ("/", 401)
    with pytest.raises(CheckpointError, match="HF_TOKEN"):
        fetch(revision=revision)
    hub.failing = None
    directory, _, _ = fetch(revision=revision)
    hub.failing = ("/", 503)
    assert fetch(revision=revision)[0] == directory  # the cache will do
    shutil.rmtree(directory.parents[2])
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(hub.url, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"cannot .*(refused|no connection).*Check the net"):
        fetch(revision=revision)


@pytest.mark.parametrize(
    "error", [AttributeError("send"), RuntimeError("Cannot send: the client has been closed.")]
)
def test_a_session_that_another_thread_closed_is_no_connection(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(CheckpointError, match="no connection"):
        fetch(revision="main")


@pytest.mark.models
def test_build_from_the_hub_and_again_without_it(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/target"].gated = True
    config = tmp_path / "pair.yaml"
    config.write_text(
        "name: tiny\n"
        "target: {hub: org/target, revision: main}\n"
        f"drafter: {{hub: org/drafter, revision: '{OLD}'}}\n"
    )

    def build(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: v for name, v in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "dflash_trt", "build", str(config)]
        return subprocess.run(
            [*command, "--output", str(tmp_path / "built")],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )

    refused = build()
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: cannot fetch the target org/target")
    assert "Traceback" not in refused.stderr
    built = build(HF_TOKEN=TOKEN)
    assert built.returncode == 0, built.stderr
    assert "fetching org/target (7) ..." in built.stderr
    manifest: dict[str, Any] = json.loads((tmp_path / "built" / "manifest.json").read_text())
    assert manifest["hub"] == {
        "target": {"id": "org/target", "commit": NEW},
        "drafter": {"id": "org/drafter", "commit": OLD},
    }
    hub.log.clear()
    again = build(HF_HUB_OFFLINE="1")
    assert (again.returncode, hub.log) == (0, [])
    assert "nothing to do" in again.stdout
