"""What engine kind `pytorch` says of machines that it does not run on, and of their memory."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dflash_trt.config import BuildConfig
from dflash_trt.doctor import examine, one_gpu
from dflash_trt.doctor.checks import Patient
from dflash_trt.engines import load_engine
from dflash_trt.engines.pytorch import engine, machine
from dflash_trt.errors import EngineError
from dflash_trt.serving.supervisor.process import find_repository
from dflash_trt.tensorrt_llm import SeenGpu
from tests.support.builds import build_pair
from tests.support.commands import run
from tests.support.families import make
from tests.support.pairs import make_pair

GIB = 1 << 30


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pytorch")
    make_pair(directory)
    build_pair(directory, directory / "built", kind="pytorch", dtype="float16")
    return directory / "built"


@pytest.mark.parametrize(
    ("capabilities", "lacks", "says"),
    [
        ([], None, "runs on an NVIDIA GPU, and here is none"),
        (["7.5"], None, r"compute capability 7\.5, and this build needs 8\.0"),
        (["9.0"], "torch", "the package torch, which is not here"),
        (["9.0"], "triton", "the package triton, which is not here"),
    ],
)
def test_serving_says_what_is_missing(
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
    capabilities: list[str],
    lacks: str | None,
    says: str,
) -> None:
    monkeypatch.setattr(machine, "compute_capabilities", lambda: capabilities)
    find = importlib.util.find_spec
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == lacks else find(name))
    with pytest.raises(EngineError, match=says):
        find_repository(built)


def test_a_pytorch_without_cuda_is_not_served_on_the_cpu(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "compute_capabilities", lambda: ["9.0"])
    with pytest.raises(EngineError, match="cannot use the GPU that is here"):
        load_engine(built / "engines" / "target")


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
def test_newer_gpus_are_served(
    built: Path, monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    monkeypatch.setattr(machine, "compute_capabilities", lambda: [capability])
    assert find_repository(built) == (built / "model_repository").resolve()


def gpu(sm: int = 90, free: int = 40 * GIB) -> SeenGpu:
    return SeenGpu(
        index=0, name="H200", sm=sm, memory_bytes=80 * GIB, free_bytes=free, driver="580.1"
    )


def results(built: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[SeenGpu]) -> dict[str, str]:
    monkeypatch.setattr(Patient, "all_gpus", property(lambda _: gpus))
    found = examine(built, generate=False)
    return {each.name: each.result for each in found if each.name.startswith(("one-gpu", "pytor"))}


def test_the_doctor_looks_at_gpu_memory_and_pytorch(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torch_for(cuda: str | None) -> None:
        fakes = {
            "torch": SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda)),
            "triton": SimpleNamespace(__version__="3.9.0"),
        }
        monkeypatch.setattr(one_gpu.importlib, "import_module", fakes.__getitem__)

    torch_for("13.0")
    good = {"one-gpu": "passed", "one-gpu-memory": "passed", "pytorch": "passed"}
    assert results(built, monkeypatch, [gpu()]) == good
    assert results(built, monkeypatch, [gpu(sm=75)]) == good | {"one-gpu": "error"}
    assert results(built, monkeypatch, [gpu(free=GIB)]) == good | {"one-gpu-memory": "error"}
    torch_for(None)
    nothing = {"one-gpu": "error", "one-gpu-memory": "not checked", "pytorch": "error"}
    assert results(built, monkeypatch, []) == nothing


def bytes_of_slots(built: Path) -> int:
    files = [built / "engines" / role / "model.onnx.data" for role in ("target", "drafter")]
    earlier = 1 << 30  # of texts before, by default
    return one_gpu.needed_bytes(built) - earlier - sum(file.stat().st_size for file in files)


def test_memory_is_that_of_weights_caches_features_and_logits(built: Path) -> None:
    # 4 layers and 1, of 4 slots, keys and values of 2 heads of 16, two bytes each
    entries = {"target": 4 * (512 + 16), "drafter": 512 + 256 + 3 * 16 + 8}
    caches = 4 * 2 * 2 * 16 * 2 * sum(entries.values())
    taps, hidden = 2, 64
    features = 4 * 256 * taps * hidden * 4
    # of 4 slots the target's, a copy that tokens are chosen from, and the drafter's
    vocab, round_tokens = 320, 16
    logits = 3 * 4 * round_tokens * vocab * 4
    assert bytes_of_slots(built) == caches + features + logits


@pytest.mark.parametrize("name", ["qwen2", "qwen3.5"])
def test_a_plan_counts_the_slots_of_a_build(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    build_pair(tmp_path, tmp_path / "built", kind="pytorch")
    places = {role: {"path": role} for role in ("target", "drafter")}
    config = {"name": "one-gpu", **places, "engine": {"kind": "pytorch"}}
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(config | {"serving": {"max_seq_len": 512}}))
    code, out, _ = run("plan", file, "--machine", "hgx-h200", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["built"] == {
        "slots": 4,
        "max_seq_len": 512,
        "slot_bytes": bytes_of_slots(tmp_path / "built") // 4,
        "fits": True,
    }
    (memory,) = plan["memory"]
    assert memory["layout"] == "1 GPU"
    assert memory["sequences"]["1024"] == 0


def test_rounds_are_in_process_unless_the_config_says_otherwise() -> None:
    def mode(kind: str, **serving: object) -> str:
        paths = {role: {"path": "/models"} for role in ("target", "drafter")}
        given = {"name": "x", "engine": {"kind": kind}, "serving": serving, **paths}
        return BuildConfig.model_validate(given).serving.mode

    assert mode("pytorch") == "in_process"
    assert mode("pytorch", slots=2) == "in_process"
    assert mode("pytorch", mode="ensemble") == "ensemble"
    assert mode("onnxruntime") == "ensemble"
