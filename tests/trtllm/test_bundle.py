"""Builds of kind `tensorrt_llm`: what they write and refuse, that they repeat, how they start.

TensorRT-LLM needs a GPU; what is written is held against its published contract elsewhere
(`test_front.py` runs the Triton models over a stand-in). Launchers are stand-ins here: they write
down what they were given, `trtllm-llmapi-launch` splits words as the published script does
(tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e).
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from builds import config_of, edit, quiet
from commands import program, run
from hub import Repository, running_hub
from llm_build import STANDINS
from load import wait_until
from pairs import make_pair

from dflash_trt.build.manifest import read_manifest
from dflash_trt.build.pipeline import build
from dflash_trt.checkpoints import load_target
from dflash_trt.config import BuildConfig
from dflash_trt.errors import CheckpointError, ConfigError, DflashError, PairError
from dflash_trt.serving.client import stream
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.launch import environment, find_binary
from dflash_trt.serving.server.process import Health
from dflash_trt.tensorrt_llm.bundle import read_info, read_llm_args

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


# what each stand-in does first
RECORD = """#!/usr/bin/env bash
{ echo "$(basename "$0")"; printf '%s\\n' "$@"; } >> "$RECORD"
"""
# what comes after a launcher's own options is the command, which it runs
RUN_BASH = 'while [ "$1" != bash ]; do shift; done\nexec "$@"\n'
# as published: the task runs in the background and the launcher waits to be stopped after it
LAUNCH = """set -e
export TLLM_SPAWN_PROXY_PROCESS=1
task="$*"
( $task; touch "$RECORD.stopped" ) &
for ((i = 0; i < 100; i++)); do [ -e "$RECORD.stopped" ] && exit; sleep 0.1; done
exit 1
"""
SERVE = """printf "PDL=%s\\n" "${TRTLLM_ENABLE_PDL:-}" >> "$RECORD"
trap 'exit 5' TERM
for ((i = 0; i < ${SERVED:-0}; i++)); do sleep 0.1; done
exit "${CODE:-0}"
"""


@pytest.fixture
def launchers(tmp_path: Path) -> dict[str, str]:
    """Put stand-ins on PATH; return the environment to run a script in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"srun": RUN_BASH, "mpirun": RUN_BASH, "tritonserver": SERVE}
    for name, text in {**programs, "trtllm-llmapi-launch": LAUNCH}.items():
        (folder / name).write_text(RECORD + text)
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "RECORD": str(tmp_path / "record")}


def start(script: Path, environment: dict[str, str], *arguments: str) -> list[str]:
    done = program(script, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return Path(environment["RECORD"]).read_text().splitlines()


@pytest.fixture
def two_machines(pair: Path) -> Path:
    edit(pair / "target", num_attention_heads=8, head_dim=8)
    edit(pair / "drafter", num_attention_heads=8, head_dim=8)
    output = pair / "two-machines"
    build(config(pair, hardware="gb300-nvl72-slice", gpus=8), output, quiet)
    assert read_info(engine(output)).nodes == 2
    return output


def test_one_machine_runs_triton(original: Path, launchers: dict[str, str]) -> None:
    built = original / "built"
    lines = start(built / "launch" / "single_node.sh", launchers, "--http-port=9000")
    assert lines[0] == "tritonserver"
    assert f"--model-repository={built}/model_repository" in lines
    assert lines[-2:] == ["--http-port=9000", "PDL=1"]


def test_a_path_with_a_space_is_said_before_triton_stumbles(
    pair: Path, launchers: dict[str, str]
) -> None:
    (pair / "built").rename(pair / "my build")
    done = program(pair / "my build" / "launch" / "single_node.sh", **launchers)
    assert done.returncode == 2
    assert "a path with a space" in done.stderr
    assert not Path(launchers["RECORD"]).exists()


@pytest.mark.models
def test_the_script_serves(pair: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    binary, ports = find_binary(runtime), free_ports()
    environment_ = environment(binary) | {"PYTHONPATH": str(STANDINS)}
    environment_["PATH"] = f"{environment_['PATH']}{os.pathsep}{binary.path.parent}"
    numbers = [f"--{kind}-port={getattr(ports, kind)}" for kind in ("http", "grpc", "metrics")]
    build(config(pair, concurrency=2), pair / "small", quiet)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [pair / "small" / "launch" / "single_node.sh", *numbers, *binary.arguments],
            env=environment_,
            stdout=log,
            stderr=log,
        )
        try:
            health, deadline = Health(ports, Security()), time.monotonic() + 60
            while not health.is_ready() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert process.poll() is None, (tmp_path / "log").read_text()
            health.close()  # Triton would wait for its connection when it is to stop
            parts = stream(f"127.0.0.1:{ports.grpc}", "a", max_tokens=8)
            text = "".join(part.text for part in parts)
        finally:
            process.terminate()
            process.wait(30)
    assert text


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_several_machines_start_a_task_for_each_gpu(
    two_machines: Path, launchers: dict[str, str], launcher: str
) -> None:
    script = {"srun": "slurm.sh", "mpirun": "mpi.sh"}[launcher]
    environment = launchers | {"TRITON_ARGS": "--http-port=9000 --log-verbose=1"}
    lines = start(two_machines / "launch" / script, environment, "--more")
    tasks = {
        "srun": ["--nodes=2", "--ntasks-per-node=4", "--mpi=pmix", "--more"],
        "mpirun": ["-np", "8", "ppr:4:node", "--more"],
    }
    assert lines[0] == launcher
    assert set(tasks[launcher]) <= set(lines[: lines.index("bash")])
    launched = lines.index("trtllm-llmapi-launch")
    assert lines[launched + 1 : launched + 3] == ["bash", "launch/task.sh"]
    served = lines[lines.index("tritonserver") :]
    assert f"--model-repository={two_machines}/model_repository" in served
    assert served[-3:] == ["--http-port=9000", "--log-verbose=1", "PDL=1"]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_how_triton_ends_is_how_the_task_does(
    two_machines: Path, launchers: dict[str, str], launcher: str
) -> None:
    """It fails or is told to stop: published launchers pass on neither."""
    script = two_machines / "launch" / {"srun": "slurm.sh", "mpirun": "mpi.sh"}[launcher]
    assert subprocess.run([script], env=launchers | {"CODE": "3"}, timeout=20).returncode == 3
    record = Path(launchers["RECORD"])
    for file in (record, record.with_name("record.stopped")):
        file.unlink()
    with subprocess.Popen([script], env=launchers | {"SERVED": "150"}) as process:
        wait_until(lambda: record.exists() and "PDL=1" in record.read_text().splitlines())
        process.terminate()
        assert process.wait(20) == 5


def test_one_of_several_machines_is_not_started_alone(
    two_machines: Path, launchers: dict[str, str]
) -> None:
    done = program(two_machines / "launch" / "single_node.sh", **launchers)
    assert done.returncode == 2
    assert "takes 2 machines" in done.stderr
    assert not Path(launchers["RECORD"]).exists()


def test_the_scripts_are_sound(two_machines: Path) -> None:
    scripts = [*(two_machines / "launch").glob("*.sh"), engine(two_machines) / "env.sh"]
    assert len(scripts) == 5
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=20)
        assert "@" not in script.read_text().replace('"$@"', "")
    subprocess.run(["shellcheck", *scripts], check=True, timeout=60)
