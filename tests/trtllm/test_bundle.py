"""Builds of kind `tensorrt_llm`: what they write and refuse, that they repeat, how they start.

TensorRT-LLM needs a GPU; what is written is held against its published contract elsewhere
(`test_ranks.py` serves them over stand-ins).
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.builder.manifest import read_manifest
from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import load_target
from dflash_trt.config import BuildConfig
from dflash_trt.errors import CheckpointError, ConfigError, DflashError, PairError
from dflash_trt.tensorrt_llm.bundle import read_info, read_llm_args
from tests.support.builds import config_of, edit, quiet
from tests.support.commands import program, run
from tests.support.hub import Repository, running_hub
from tests.support.llm_build import STANDINS
from tests.support.pairs import make_pair

COMMIT = "0" * 39 + "7"


def config(directory: Path, **engine: object) -> BuildConfig:
    return config_of(directory, engine={"kind": "tensorrt_llm", "gpus": 4, **engine})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    make_pair(directory, tied=False, rope_theta=10000.0)
    build(config(directory), directory / "built", quiet)
    return directory


def engine(build: Path) -> Path:
    return build / "engines" / "tensorrt_llm"


def test_the_arguments_name_what_lies_beside_them(pair: Path) -> None:
    shutil.rmtree(pair / "target")  # the bundle stands alone
    moved = pair / "built moved"
    (pair / "built").rename(moved)
    stored = yaml.safe_load((engine(moved) / "llm_args.yaml").read_text())
    args = read_llm_args(engine(moved))
    assert stored["model"] == "target"
    assert stored["speculative_config"]["speculative_model"] == "drafter"
    assert stored["speculative_config"]["decoding_type"] == "DFlash"
    assert Path(args["model"]).samefile(engine(moved) / "target")
    assert (Path(args["speculative_config"]["speculative_model"]) / "config.json").is_file()


@pytest.mark.models
def test_a_target_on_the_hub_stays_there(original: Path, tmp_path: Path) -> None:
    """Only its config and tokenizer are fetched; the branch becomes its commit."""
    file = tmp_path / "pair.yaml"
    file.write_text(
        "name: tiny\n"
        "target: {hub: org/target, revision: main}\n"
        "drafter: {hub: org/drafter, revision: main}\n"
        "engine: {kind: tensorrt_llm, gpus: 4, checkpoints: hub}\n"
    )
    command = [sys.executable, "-m", "dflash_trt", "build", str(file), "--json"]
    with running_hub() as hub:
        for role in ("target", "drafter"):
            hub.repositories[f"org/{role}"] = Repository(original / role, {"main": COMMIT})
        home = str(tmp_path / "home")
        done = program(*command, "--output", tmp_path / "built", HF_ENDPOINT=hub.url, HF_HOME=home)
        assert done.returncode == 0, done.stderr
        weights = [line for line in hub.log if "safetensors" in line or "/lfs/" in line]
    assert not any("/org/target/" in line for line in weights)
    assert len([line for line in weights if line.startswith("GET /lfs/")]) == 1  # the drafter's
    built = engine(tmp_path / "built")
    args = read_llm_args(built)
    assert (args["model"], args["revision"]) == ("org/target", COMMIT)
    assert not (built / "target").exists()
    drafter = Path(args["speculative_config"]["speculative_model"])
    name = "model.safetensors"
    assert (drafter / name).read_bytes() == (original / "drafter" / name).read_bytes()
    manifest = read_manifest(tmp_path / "built")
    assert manifest["hub"]["target"] == {"id": "org/target", "commit": COMMIT}


GIVEN = """
import sys
from dflash_trt.tensorrt_llm import with_local_target
args = with_local_target({"model": "org/target", "revision": sys.argv[1]})
print(args.pop("model"), args)
"""


@pytest.mark.models
def test_a_target_on_the_hub_is_given_as_a_folder(original: Path, tmp_path: Path) -> None:
    """gpt-oss's further copies of its weights are left out; without a network it is found again."""
    target = Path(shutil.copytree(original / "target", tmp_path / "target"))
    (target / "original").mkdir()
    (target / "original" / "model.safetensors").write_bytes(b"x" * 100)
    command = [sys.executable, "-c", GIVEN, COMMIT]
    with running_hub() as hub:
        hub.repositories["org/target"] = Repository(target, {"main": COMMIT})
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        for offline in ("0", "1"):
            done = program(*command, HF_HUB_OFFLINE=offline, **variables)
            assert done.returncode == 0, done.stderr
            folder, rest = done.stdout.split()
            assert rest == "{}"
            weights = {file.name for file in Path(folder).rglob("*.safetensors")}
            assert weights == {"model.safetensors"}
            assert not (Path(folder) / "original").exists()


def test_what_the_graphs_refuse_may_pass(pair: Path) -> None:
    edit(pair / "target", architectures=["KimiK25ForConditionalGeneration"])
    with pytest.raises(CheckpointError):
        load_target(pair / "target")
    assert build(config(pair), pair / "new", quiet).built
    code, out, _ = run("inspect", pair / "target", pair / "drafter")
    assert (code, "fits          tensorrt_llm" in out) == (0, True)


def cut_weights(pair: Path) -> None:
    file = pair / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


WRONG: dict[str, tuple[Any, type[DflashError], str]] = {
    "another vocabulary": (lambda p: edit(p / "drafter", vocab_size=384), PairError, "vocabulary"),
    "no hidden states": (
        lambda p: edit(p / "target", architectures=["Gemma4ForConditionalGeneration"]),
        ConfigError,
        "no hidden states of Gemma4",
    ),
    "cut weights": (cut_weights, CheckpointError, "truncated"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_pair_writes_nothing(pair: Path, case: str) -> None:
    spoil, error, says = WRONG[case]
    spoil(pair)
    with pytest.raises(error, match=says):
        build(config(pair), pair / "new", quiet)
    assert not (pair / "new").exists()


@pytest.fixture
def two_machines(pair: Path) -> Path:
    edit(pair / "target", num_attention_heads=8, head_dim=8)
    edit(pair / "drafter", num_attention_heads=8, head_dim=8)
    output = pair / "two-machines"
    build(config(pair, hardware="gb300-nvl72-slice", gpus=8), output, quiet)
    assert read_info(engine(output)).nodes == 2
    return output


def test_one_of_several_machines_is_not_served_alone(
    two_machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(STANDINS / "bin"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(STANDINS))
    code, _, error = run("serve", two_machines)
    assert code == 1
    assert "takes 2 machines" in error
    assert "Start it with Slurm" in error


def test_the_variables_are_those_of_a_shell(two_machines: Path) -> None:
    script = engine(two_machines) / "env.sh"
    assert program("shellcheck", script).returncode == 0
    done = program("bash", "-c", f"env --ignore-environment bash -c '. {script} && env'")
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert read_info(engine(two_machines)).environment.items() <= variables.items()
