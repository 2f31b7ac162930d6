"""The graphs as files: the op profile that ONNX Runtime and TensorRT share; memory of a build."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from builds import build_engines
from op_profile import assert_in_profile
from pairs import make_pair
from safetensors.numpy import save_file


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
from dflash_trt.checkpoints import DrafterSpec
from dflash_trt.checkpoints import load_target
from dflash_trt.build.engines import EngineOptions, build_target
target = load_target(Path(sys.argv[1]))
shared = vars(target.spec).copy()
for name in ("model_type", "tie_word_embeddings", "eos_token_ids"):
    del shared[name]
drafter = DrafterSpec(
    **shared, block_size=8, mask_token_id=1, target_layer_ids=(1,), num_target_layers=24
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = EngineOptions(slots=1, max_seq_len=64, threads=1, ranks=int(sys.argv[3]))
build_target(target, drafter, Path(sys.argv[2]), options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.models
@pytest.mark.parametrize("ranks", [1, 2])
def test_build_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, ranks: int) -> None:
    hidden, wide, layers, vocab = 512, 2048, 24, 1024
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            **{f"{layer}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"},
            f"{layer}mlp.gate_proj.weight": (wide, hidden),
            f"{layer}mlp.up_proj.weight": (wide, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, wide),
        }
    tensors = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    model, engine = tmp_path / "model", tmp_path / "engine"
    model.mkdir()
    engine.mkdir()
    save_file(tensors, model / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": wide,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "hidden_act": "silu",
    }
    (model / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", BUILD, str(model), str(engine), str(ranks)]
    grown = int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    largest = 2 * wide * hidden * 4  # gate and up, side by side in float32
    written = sum(file.stat().st_size for file in engine.rglob("model.onnx.data"))
    assert written > 30 * largest / 2  # the model is far larger than what may be resident
    assert grown * 1024 < 6 * largest  # read, converted, handed over: a few copies of one tensor
