"""ONNX Runtime's CUDA provider: what is refused, and where, on a machine that has no GPU.

Graphs of every family pass `check_graph` in `op_profile.assert_in_profile`; the step is in
`test_tensorrt_step.py`; what needs a GPU is in `tests/gpu`.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from dflash_trt.engines.cuda import PROVIDER, engine
from dflash_trt.engines.cuda.kernels import check_graph, check_placement
from dflash_trt.engines.info import read_info
from dflash_trt.engines.onnxruntime import GRAPH_FILE, load_session
from dflash_trt.engines.step import load_engine
from dflash_trt.errors import EngineError
from tests.support.builds import build_engines, build_pair, contents
from tests.support.families import pair_of
from tests.support.pairs import make_pair


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cuda")
    make_pair(directory)
    for device in ("cpu", "cuda"):
        build_pair(directory, directory / device, device=device)
    return directory


def test_the_file_is_the_same(built: Path) -> None:
    cpu, cuda = (contents(built / device / "engines") for device in ("cpu", "cuda"))
    changed = {name for name in cpu if cpu[name] != cuda[name]}
    assert changed == {"target/engine.json", "drafter/engine.json"}
    assert json.loads(cuda["target/engine.json"])["device"] == "cuda"


def test_what_weights_alone_go_into_needs_no_kernel(tmp_path: Path) -> None:
    """Experts' matrices in bf16 are widened and split once, when the graph is loaded."""
    pair = pair_of("qwen3-moe", "z-lab", tmp_path, dtype="bfloat16")
    sizes: dict[str, Any] = {"slots": 2, "max_seq_len": 64, "device": "cuda"}
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "engines", **sizes)
    path = tmp_path / "engines" / "target" / "model.onnx"
    nodes = onnx.load(path, load_external_data=False).graph.node
    assert any(node.op_type == "Split" and len(node.input) == 1 for node in nodes)
    check_graph(path)


@pytest.mark.parametrize("change", ["op", "type"])
def test_a_node_without_a_kernel_is_named(built: Path, tmp_path: Path, change: str) -> None:
    model = onnx.load(built / "cuda/engines/target/model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
    if change == "op":
        node.op_type = "Erf"
    else:
        narrow = onnx.helper.make_node("Cast", [node.input[0]], ["narrow"], "narrow", to=16)
        node.input[0] = "narrow"
        model.graph.node.insert([*model.graph.node].index(node), narrow)
    onnx.save(model, tmp_path / "model.onnx")
    words = rf"{node.name} \({node.op_type} of .*\) would run on the CPU: ONNX Runtime 1\.31"
    if change == "type":  # the cast itself is of a type that no graph of ours has
        words = r"narrow \(Cast of float\) would run on the CPU"
    with pytest.raises(EngineError, match=words):
        check_graph(tmp_path / "model.onnx")


def test_a_build_with_such_a_node_writes_nothing(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"version": "1.31", "kernels": {}}
    monkeypatch.setattr("dflash_trt.engines.cuda.kernels._table", lambda: table)
    with pytest.raises(EngineError, match=r"node_\w+ \(\w+ of \w+\) would run on the CPU"):
        build_pair(built, tmp_path / "built", device="cuda")
    assert not (tmp_path / "built").exists()


class Session:
    """An `InferenceSession` that reports where its nodes are."""

    def __init__(self, **nodes: tuple[str, str]) -> None:
        self._nodes = nodes

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        def part(name: str, op_type: str, provider: str) -> Any:
            nodes = [SimpleNamespace(name=name, op_type=op_type)]
            return SimpleNamespace(ep_name=provider, get_nodes=lambda: nodes)

        return [part(name, *each) for name, each in self._nodes.items()]


def test_only_sizes_are_computed_on_the_cpu(built: Path) -> None:
    path = built / "cuda/engines/target/model.onnx"
    nodes = onnx.load(path, load_external_data=False).graph.node
    shapes = {node.output[0] for node in nodes if node.op_type == "Shape"}
    sizes = next(n.name for n in nodes if n.op_type == "Concat" and n.input[0] in shapes)
    product = next(node.name for node in nodes if node.op_type == "Gemm")
    where = {sizes: ("Concat", "CPUExecutionProvider"), product: ("Gemm", PROVIDER)}
    check_placement(Session(**where), path)
    where[product] = ("Gemm", "CPUExecutionProvider")
    with pytest.raises(EngineError, match=rf"would run {product} \(Gemm\) on the CPU"):
        check_placement(Session(**where), path)


def test_a_session_without_the_provider_is_refused(built: Path) -> None:
    directory = built / "cuda/engines/target"
    session = load_session(directory, read_info(directory), ort.SessionOptions())
    with pytest.raises(EngineError, match="cannot load its CUDA provider here"):
        check_placement(session, directory / GRAPH_FILE)


@pytest.mark.parametrize(
    ("lacks", "says"),
    [("gpu", "device: cuda.*none"), ("provider", "no CUDA provider"), ("torch", "PyTorch's")],
)
def test_what_is_missing_is_said(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, says: str
) -> None:
    shutil.copytree(built / "cuda/engines/target", tmp_path / "target")
    if lacks != "gpu":
        monkeypatch.setattr(engine, "compute_capabilities", lambda: ["9.0"])
    if lacks == "torch":
        monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER])
        monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=says):
        load_engine(tmp_path / "target")
