"""Targets with a mixture of experts, against `transformers`."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.builder.engines import EngineOptions, build_target
from dflash_trt.checkpoints import TargetSpec, load_target
from dflash_trt.checks import check_pair
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import CheckpointError
from dflash_trt.graphs.builder import PART_DOMAIN
from dflash_trt.graphs.target import target_graph
from dflash_trt.weights import Weights
from tests.support.builds import edit
from tests.support.equality import Case, target_step
from tests.support.families import MOE
from tests.support.op_profile import PROFILE

pytestmark = pytest.mark.models

every = pytest.mark.parametrize("case", MOE, indirect=True)


@every
def test_the_body_for_tensorrt_gives_the_same(case: Case, tmp_path: Path) -> None:
    built = case.built
    taps, rows = built.drafter.spec.target_layer_ids, Engine(built.target_engine).info.cache_len
    target_graph(built.target, taps, rows, "tensorrt").save(tmp_path, lambda name: None)
    shutil.copy(built.target_engine / "engine.json", tmp_path)
    engines = Engine(built.target_engine), Engine(tmp_path)
    for tokens, start in ((built.texts[0][:33], 0), (built.texts[0][33:34], 33)):
        ours, other = (target_step(engine, tokens, start) for engine in engines)
        for name in ("logits", "features"):
            np.testing.assert_allclose(ours[name], other[name], atol=1e-4, rtol=0)
    assert _operators(tmp_path) <= PROFILE
    # sorting the tokens by expert takes sizes that are computed, which is for the CPU only
    assert _operators(built.target_engine) <= PROFILE | {"Cast"}


@pytest.mark.parametrize("case", ["gpt-oss"], indirect=True)
def test_mxfp4_experts(case: Case, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for directory in (plain, packed):
        shutil.copytree(case.built.pair.target_dir, directory)
    file = "model.safetensors"
    tensors = load_file(plain / file)
    stacks = [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    codes = {}
    for name in stacks:
        count, wide, rows = tensors[name].shape  # [experts, in, out]
        shape = (count, rows, wide // 32)
        codes[f"{name}_blocks"] = rng.integers(256, size=(*shape, 16), dtype=np.uint8)
        codes[f"{name}_scales"] = rng.integers(122, 126, size=shape, dtype=np.uint8)
    save_file({n: t for n, t in tensors.items() if n not in stacks} | codes, packed / file)
    edit(packed, quantization_config={"quant_method": "mxfp4"})
    weights = load_target(packed).weights  # compared with transformers' in test_quantized.py
    save_file(tensors | {name: weights.read(name) for name in stacks}, plain / file)
    logits = []
    for directory in (plain, packed):
        _build(case, directory, directory / "engine")
        outputs = target_step(Engine(directory / "engine"), case.built.texts[0][:40], 0)
        logits.append(outputs["logits"].copy())
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("case", ["gpt-oss"], indirect=True)
def test_a_build_reads_one_expert_at_a_time(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = case.built.target.spec
    read, sizes = Weights.read, []

    def watched(weights: Weights, *args: Any) -> np.ndarray:
        found = read(weights, *args)
        sizes.append(found.size)
        return found

    monkeypatch.setattr(Weights, "read", watched)
    _build(case, case.built.pair.target_dir, tmp_path / "engine")
    assert max(sizes) <= spec.vocab_size * spec.hidden_size  # less than a layer's experts


def test_configs_as_published(tmp_path: Path) -> None:
    MOE["qwen3-moe"]().save_pretrained(tmp_path / "qwen")
    edit(
        tmp_path / "qwen",
        architectures=["Qwen3MoeForCausalLM"],
        num_local_experts=None,
        num_experts=8,
        rope_parameters=None,
        rope_theta=1000000.0,
        rope_scaling=None,
    )
    layers = _spec(tmp_path / "qwen").layers
    assert [layer.experts and layer.experts.count for layer in layers] == [8, None, 8, 8]
    assert [layer.intermediate_size for layer in layers] == [48, 96, 48, 48]
    MOE["gpt-oss"]().save_pretrained(tmp_path / "oss")
    edit(
        tmp_path / "oss",
        architectures=["GptOssForCausalLM"],
        layer_types=None,
        swiglu_alpha=None,
        swiglu_limit=None,
    )
    spec = _spec(tmp_path / "oss")
    assert [layer.window for layer in spec.layers] == [10, None, 10, None]
    assert {layer.experts.clamped for layer in spec.layers if layer.experts} == {(1.702, 7.0)}
    assert spec.biases == ("q", "k", "v", "o")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_experts_per_tok": 9}, "is 9, but there are 8 experts"),
        ({"num_local_experts": 10**12}, "num_local_experts is 10"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_wrong_config_of_experts_is_refused(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    MOE["qwen3-moe"]().save_pretrained(tmp_path)
    edit(tmp_path, architectures=["Qwen3MoeForCausalLM"], **change)
    with pytest.raises(CheckpointError, match=what):
        _spec(tmp_path)


def _spec(directory: Path) -> TargetSpec:
    save_file({}, directory / "model.safetensors")
    return load_target(directory).spec


def _build(case: Case, source: Path, engine: Path) -> None:
    target = load_target(source)
    check_pair(target, case.built.drafter, None)
    engine.mkdir()
    options = EngineOptions(slots=1, max_seq_len=64, threads=1)
    build_target(target, case.built.drafter.spec, engine, options)


def _operators(engine: Path) -> set[str]:
    model = onnx.load(engine / "model.onnx", load_external_data=False)
    bodies = [node for function in model.functions for node in function.node]
    nodes = [node for node in model.graph.node if node.domain != PART_DOMAIN]
    return {node.op_type for node in (*nodes, *bodies)} - {"Constant"}


@pytest.mark.parametrize("case", ["gpt-oss"], indirect=True)
def test_sinks_do_not_show_how_many_rows_are_seen(case: Case) -> None:
    """Bit for bit, because a softmax's sum starts with the sink."""
    built = case.built
    engine, tokens = Engine(built.target_engine), built.texts[0][:30]
    found = []
    for visible in (32, 40, 45, 160):
        step = engine.step(0, 1, 30, visible, 30)
        step.inputs["tokens"][:] = tokens
        step.inputs["positions"][:] = step.inputs["scored_tokens"][:] = np.arange(30)
        step.inputs["write_index"][:] = 0
        step.inputs["mask"][:] = np.tri(30, visible, dtype=bool)
        step.run()
        found.append(step.outputs["logits"].copy())
    assert all((each == found[0]).all() for each in found)
