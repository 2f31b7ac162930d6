"""`serving.style: llmapi`: TensorRT-LLM's own Triton model, by its published tables."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from llm_build import standins, write_llm_build
from tritonclient.grpc.model_config_pb2 import DataType

from dflash_trt.build.repository import read_config
from dflash_trt.config import load_config
from dflash_trt.errors import ConfigError, ServerError
from dflash_trt.serving.health import Health, health_of
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.launch import command, environment, find_binary
from dflash_trt.serving.server.process import Server

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "examples" / "pycode"
ARGS = {"max_batch_size": 2, "max_seq_len": 512}
# by type and shape, as published
TENSORS = json.loads((ROOT / "tests" / "schemas" / "llmapi_tensors.json").read_text())
WAIT = 60.0
# does with the files of the layout what the published model.py does
MODEL = """
import json, os, sys
import triton_python_backend_utils as pb
import yaml

def read(*, triton):
    name = os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    with open(os.path.join(pb.get_model_dir(), name)) as file:
        config = yaml.safe_load(file)
    return config.pop("triton_config") if triton else {
        key: value for key, value in config.items() if key != "triton_config"}

class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, config):
        config.set_model_transaction_policy(dict(decoupled=bool(read(triton=True)["decoupled"])))
        config.set_max_batch_size(int(read(triton=True)["max_batch_size"]))
        return config

    def initialize(self, args):
        sys.path += os.environ["PYTHONPATH"].split(os.pathsep)
        import tensorrt_llm
        self.api = tensorrt_llm
        self.llm = tensorrt_llm.LLM(**read(triton=False))

    def execute(self, requests):
        for request in requests:
            text = pb.get_input_tensor_by_name(request, "text_input").as_numpy().item().decode()
            result = self.llm.generate(text, self.api.SamplingParams(max_tokens=9))
            sender = request.get_response_sender()
            out = pb.Tensor("text_output", pb.np.array([result.outputs[0].text.encode()], object))
            sender.send(pb.InferenceResponse([out]), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return write_llm_build(tmp_path / "build", PAIR, ARGS, style="llmapi")


@contextmanager
def _tritonserver(build: Path, complete: bool) -> Iterator[Health]:
    """Run as the layout's README says; complete: whether models may complete their configs."""
    ports, runtime, security = free_ports(), build / "runtime", Security()
    binary = find_binary(runtime)
    line = command(binary, build / "model_repository", ports, f"llmapi_{os.getpid()}_", security)
    if complete:
        line.remove("--disable-auto-complete-config")
    with (build / "server.log").open("wb") as log:
        server = subprocess.Popen(
            line, env=environment(binary), cwd=build, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        health, deadline = health_of(ports, security), time.monotonic() + WAIT
        while not health.is_ready():
            assert server.poll() is None, (build / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield health
    finally:
        health.close()
        server.terminate()
        server.wait(WAIT)


def _table(tensors: Any) -> dict[str, str]:
    table: dict[str, list[str]] = {}
    for each in tensors:
        kind = f"{DataType.Name(each.data_type).removeprefix('TYPE_')} {list(each.dims)}"
        table.setdefault(kind, []).append(each.name)
    return {kind: sorted(names) for kind, names in table.items()}


def test_tensors_are_the_published_ones(build: Path) -> None:
    config = read_config(build / "model_repository" / "tensorrt_llm" / "config.pbtxt")
    assert _table(config.input) == TENSORS["inputs"]
    assert _table(config.output) == TENSORS["outputs"]
    assert [each.name for each in config.input if not each.optional] == ["text_input"]
    assert (config.name, config.backend, config.max_batch_size) == ("tensorrt_llm", "python", 0)
    assert config.model_transaction_policy.decoupled


def test_model_yaml_has_the_arguments_and_what_triton_must_know(build: Path) -> None:
    version = build / "model_repository" / "tensorrt_llm" / "1"
    content = yaml.safe_load((version / "model.yaml").read_text())
    assert content.pop("triton_config") == {
        "max_batch_size": 0,
        "decoupled": True,
        "cancellation_check_period_ms": 100,
    }
    arguments = yaml.safe_load((build / "engines/tensorrt_llm/llm_args.yaml").read_text())
    arguments["model"] = "engines/tensorrt_llm/target"
    arguments["speculative_config"]["speculative_model"] = "engines/tensorrt_llm/drafter"
    assert content == arguments
    assert (build / content["model"]).is_dir()
    assert not (version / "model.py").exists()
    assert "triton_backend/all_models/llmapi" in (version / "README.md").read_text()


@pytest.mark.models
@pytest.mark.parametrize("complete", [True, False])
def test_the_layout_runs_with_and_without_auto_completion(build: Path, complete: bool) -> None:
    """With a model.py that reads the files as the published one does."""
    (build / "model_repository" / "tensorrt_llm" / "1" / "model.py").write_text(MODEL)
    with standins(), _tritonserver(build, complete) as health:
        url, body = "models/tensorrt_llm/generate_stream", {"text_input": "def main():"}
        _, text = health._ask("POST", url, WAIT, body)
        [line] = [line for line in text.splitlines() if line]
        assert json.loads(line.removeprefix("data: "))["text_output"]


def test_serve_says_how_it_is_started(build: Path) -> None:
    with pytest.raises(ServerError, match="style llmapi") as caught:
        Server(build, free_ports())
    assert "README.md" in caught.value.fix


@pytest.mark.parametrize(
    ("engine", "serving", "words"),
    [
        ("onnxruntime", "{style: llmapi}", "engine.kind tensorrt_llm"),
        ("tensorrt_llm", "{slots: 3}", "slots has no effect"),
        ("tensorrt_llm", "{mode: ensemble}", "mode has no effect"),
    ],
)
def test_settings_that_do_not_go_with_the_engine(
    engine: str, serving: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"name: x\ntarget: {{path: a}}\ndrafter: {{path: b}}\n"
        f"engine: {{kind: {engine}}}\nserving: {serving}\n"
    )
    with pytest.raises(ConfigError, match=words):
        load_config(file)
