"""The graphs as files: the op profile that ONNX Runtime and TensorRT share; memory of a build."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from dflash_trt.checkpoints import load_target
from dflash_trt.config import Storage
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.graphs import target_graph
from tests.support import families
from tests.support.builds import build_engines
from tests.support.op_profile import assert_in_profile
from tests.support.pairs import make_pair


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("graphs")
    pair = make_pair(directory / "pair", family=request.param, tied=request.param == "qwen3")
    build_engines(pair.target_dir, pair.drafter_dir, directory, slots=2, max_seq_len=64)
    return directory


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_graph_stays_in_the_profile(engines: Path, role: str) -> None:
    assert_in_profile(engines / role / "model.onnx")


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_weights_are_external(engines: Path, role: str) -> None:
    model = onnx.load(engines / role / "model.onnx", load_external_data=False)
    inside = [t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    assert sum(len(t.raw_data) for t in inside) < 16_384
    assert any(t.name == "model.embed_tokens.weight" for t in model.graph.initializer)


def test_layers_of_a_quantized_target_have_the_mask_of_their_window(tmp_path: Path) -> None:
    """Where heads share keys, a mask is repeated for them: once for each window, as it is run."""
    pair = families.make("qwen2", tmp_path)
    target = load_target(pair.target_dir)
    nodes = target_graph(target, (), 64, storage=Storage(bits=8)).graph
    masks = [node.inputs[3] for node in nodes if node.op_type == "AttendInSeveralRows"]
    windows = [layer.window for layer in target.spec.layers]
    assert windows == [None, None, 10, 10]
    assert masks[0] is masks[1]
    assert masks[2] is masks[3]
    assert masks[0] is not masks[2]
    sizes: dict[str, Any] = {"slots": 1, "max_seq_len": 64, "storage": Storage(bits=8)}
    build_engines(pair.target_dir, pair.drafter_dir, tmp_path / "engines", **sizes)
    use_one_pool(2)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    ort.InferenceSession(tmp_path / "engines/target/model.onnx", options)
    run = onnx.load(tmp_path / "run.onnx", load_external_data=False).graph.node
    repeats = [node for node in run if node.op_type == "Concat" and len({*node.input}) == 1]
    assert len(repeats) == 2


def test_a_tied_embedding_is_written_once(tmp_path: Path) -> None:
    sizes = {}
    for tied in (True, False):
        pair = make_pair(tmp_path / f"pair{tied}", tied=tied, vocab=2048)
        directory = tmp_path / str(tied)
        build_engines(pair.target_dir, pair.drafter_dir, directory, slots=1, max_seq_len=64)
        sizes[tied] = (directory / "target" / "model.onnx.data").stat().st_size
    assert sizes[False] - sizes[True] >= 2048 * 64 * 4


BUILD = """
import resource, sys
from pathlib import Path
from dflash_trt.checkpoints import load_drafter, load_target
from dflash_trt.builder.engines import EngineOptions, build_target
target, drafter = load_target(Path(sys.argv[1])), load_drafter(Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = EngineOptions(slots=1, max_seq_len=64, threads=1)
build_target(target, drafter.spec, Path(sys.argv[3]), options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.models
def test_build_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    hidden, wide = 512, 2048
    shape = {"hidden": hidden, "intermediate": wide, "layers": 24, "vocab": 1024}
    heads = {"heads": 8, "kv_heads": 8, "head_dim": 64}
    pair = make_pair(tmp_path, family="llama", dtype="bfloat16", **shape, **heads)
    (tmp_path / "engine").mkdir()
    words = [pair.target_dir, pair.drafter_dir, tmp_path / "engine"]
    command = [sys.executable, "-c", BUILD, *words]
    grown = int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    largest = 2 * wide * hidden * 4  # gate and up, side by side in float32
    written = sum(file.stat().st_size for file in tmp_path.rglob("model.onnx.data"))
    assert written > 30 * largest / 2  # the model is far larger than what may be resident
    assert grown * 1024 < 6 * largest  # read, converted, handed over: a few copies of one tensor
