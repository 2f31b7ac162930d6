"""GGUF files of every family: their spec and tensors are the checkpoint's, what is else is refused.

The files are laid out as llama.cpp's converter does (tests/support/ggufs.py).
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from dflash_trt.checkpoints import load_target
from dflash_trt.checks import inspect
from dflash_trt.config import Storage
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import CheckpointError
from dflash_trt.weights.gguf import LINK, as_directory, left_out, open_tensors
from dflash_trt.weights.gguf.header import read_header
from tests.support import families as tiny
from tests.support import ggufs, reference
from tests.support.builds import build_engines, edit_weights, with_float_inputs
from tests.support.equality import target_step
from tests.support.pairs import Pair, write_pair

# as the files can say: Gemma 3 has every sixth layer without a window, gpt-oss its own activation
SIX = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 16,
}
YARN = tiny.YARN | {"rope_theta": 150000.0, "factor": 8.0, tiny.ORIGINAL: 64}
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "mistral3": lambda: MistralConfig(**tiny.WIDE, **tiny.HEADS, sliding_window=None),
    "qwen3moe": lambda: Qwen3MoeConfig(**tiny.QWEN_MOE, norm_topk_prob=True),
    "gpt-oss": lambda: GptOssConfig(
        **tiny.TARGET | {"intermediate_size": 64},
        num_experts_per_tok=3,
        num_local_experts=8,
        sliding_window=10,
        rope_parameters=YARN,
    ),
    "gemma2": lambda: Gemma2Config(
        **tiny.GEMMA | {"query_pre_attn_scalar": 16},
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(**tiny.GEMMA3 | SIX, final_logit_softcapping=20.0),
    "gemma4": lambda: tiny.DENSE["gemma4-31b"]().get_text_config(),
    "gemma4-text": tiny.DENSE["gemma4"],
    "qwen3next": lambda: Qwen3NextConfig(
        **tiny.HYBRID_MOE, intermediate_size=96, norm_topk_prob=True
    ),
    "qwen35": tiny.HYBRIDS["qwen3.5"],
    "qwen35moe": tiny.HYBRIDS["qwen3.5-moe"],
}
TOKENS = [*range(3, 43)]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def make(name: str) -> Pair:
        return write_pair(tmp_path_factory.mktemp(name), MODELS[name](), tiny.DRAFTER)

    return make


@pytest.mark.parametrize("name", MODELS)
def test_spec_and_tensors_are_those_of_the_checkpoint(
    pair_of: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    pair = pair_of(name)
    model = load_target(as_directory(ggufs.write(tmp_path / "model.gguf", pair.target_dir)))
    expected = load_target(pair.target_dir).spec
    layers = [
        replace(layer, delta_net=net and replace(net, tiled=not net.grouped, grouped=False))
        for layer in expected.layers
        for net in [layer.delta_net]
    ]
    epsilon = float(np.float32(expected.rms_norm_eps))
    expected = replace(expected, layers=tuple(layers), rms_norm_eps=epsilon)
    assert asdict(model.spec) == asdict(expected)
    tensors = ggufs.kept_order(pair.target_dir)
    assert set(model.weights.names) == set(tensors)
    for tensor, values in tensors.items():
        seen = model.weights.read(tensor)
        if tensor.endswith("A_log"):  # a logarithm of an exponential
            np.testing.assert_allclose(seen, values, rtol=1e-6, err_msg=tensor)
            continue
        # stored with 1 added, which graphs add again: less than that adds cannot come back
        plus = np.float32(expected.norm_offset if tensor.endswith("norm.weight") else 0)
        assert np.array_equal(seen + plus, values + plus), tensor


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_checkpoint(
    pair_of: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    pair = pair_of(name)
    file = ggufs.write(tmp_path / "model.gguf", pair.target_dir)
    assert_logits(file, pair, tmp_path)


@pytest.mark.parametrize("name", ["gemma3", "qwen3moe", "gpt-oss"])
def test_logits_of_blocks(pair_of: Callable[[str], Pair], tmp_path: Path, name: str) -> None:
    """They are those of a checkpoint whose weights blocks can hold."""
    pair = Pair(tmp_path / "target", pair_of(name).drafter_dir)
    shutil.copytree(pair_of(name).target_dir, pair.target_dir)

    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        for tensor, values in tensors.items():
            across = name == "gpt-oss" and values.ndim == 3
            rows = (values.swapaxes(1, 2) if across else values).contiguous().numpy()
            if rows.ndim < 2 or rows.shape[-1] % 32 or tensor.endswith("_bias"):
                continue
            blocks = gguf.quants.quantize(rows, Kind.Q8_0)
            plain = torch.from_numpy(gguf.quants.dequantize(blocks, Kind.Q8_0)).view(rows.shape)
            tensors[tensor] = (plain.swapaxes(1, 2) if across else plain).contiguous()

    edit_weights(pair.target_dir, rounded)
    file = ggufs.write(tmp_path / "model.gguf", pair.target_dir, Kind.Q8_0)
    assert_logits(file, pair, tmp_path)


def assert_logits(file: Path, pair: Pair, directory: Path) -> None:
    build_engines(as_directory(file), pair.drafter_dir, directory / "e", slots=1, max_seq_len=64)
    expected, _ = reference.target_logits_and_taps(pair.target_dir, TOKENS, [0])
    seen = target_step(Engine(directory / "e" / "target"), TOKENS, 0)["logits"]
    np.testing.assert_allclose(seen, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind", "least"),
    [
        ("qwen3moe", Kind.Q8_0, 70),
        ("qwen35", Kind.Q8_0, 25),
        ("gpt-oss", Kind.Q8_0, 18),
        ("gpt-oss", Kind.MXFP4, 0),
    ],
)
def test_blocks_of_rows_stay_as_stored(
    pair_of: Callable[[str], Pair], tmp_path: Path, name: str, kind: Kind, least: int
) -> None:
    """Every matrix is the one that `gguf` dequantizes; experts are cut out of their stacks."""
    pair = pair_of(name)
    file = ggufs.write(tmp_path / "model.gguf", pair.target_dir, kind)
    weights = load_target(as_directory(file)).weights
    kept = 0
    for tensor, values in ggufs.kept_order(pair.target_dir).items():
        if values.ndim < 2 or tensor.endswith("_bias"):
            continue
        stacked = values.ndim == 3 and ".experts." in tensor  # gpt-oss': [experts, in, out]
        rows = np.ascontiguousarray(values.swapaxes(1, 2) if stacked else values)
        if rows.shape[-1] % 32 or tensor.endswith(("mlp.gate.weight", "mlp.router.weight")):
            continue
        plain = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        plain = plain.reshape(rows.shape)
        assert np.array_equal(weights.read(tensor), plain.swapaxes(1, 2) if stacked else plain)
        if kind == Kind.Q8_0 and weights.form(tensor):
            kept += 1
            [piece] = weights.blocks(tensor, len(rows))
            assert np.array_equal(
                (piece.codes * piece.scales[..., None]).reshape(rows.shape), plain
            )
    assert kept >= least
    for tensor in weights.names:
        pieces = list(weights.pieces(tensor, 3))
        assert np.array_equal(np.concatenate(pieces), weights.read(tensor)), tensor


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name == "qwen3moe" else pytest.mark.models)
        for name in MODELS
        for kind in (Kind.Q4_0, Kind.Q4_1, Kind.MXFP4)
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_token_in_kept_blocks_stands_alone(
    pair_of: Callable[[str], Pair], tmp_path: Path, name: str, kind: Kind
) -> None:
    """Even where an expert has it alone: of 4 bits ONNX Runtime has another kernel for one row."""
    pair = pair_of(name)
    file = ggufs.write(tmp_path / "model.gguf", pair.target_dir, kind)
    engines = tmp_path / "e"
    options = {"storage": Storage(keep_blocks=True), "slots": 2, "max_seq_len": 64}
    build_engines(as_directory(file), pair.drafter_dir, engines, **options)
    engine = Engine(engines / "target")
    assert engine.info.quantized
    whole = target_step(engine, TOKENS, 0)["logits"].copy()
    build_engines(as_directory(file), pair.drafter_dir, tmp_path / "f", slots=2, max_seq_len=64)
    plain = target_step(Engine(tmp_path / "f" / "target"), TOKENS, 0)["logits"]
    size = [(tmp_path / place / "target" / "model.onnx.data").stat().st_size for place in "ef"]
    assert size[0] < 0.65 * size[1]  # experts, too
    not_rounded = Engine(with_float_inputs(engines / "target", tmp_path / "not_rounded"))
    exact = target_step(not_rounded, TOKENS, 0)["logits"]
    np.testing.assert_allclose(exact, plain, atol=2e-4, rtol=0)
    first = target_step(engine, TOKENS[:2], 0)["logits"].copy()
    assert np.array_equal(whole[:2], first)
    for place in range(2, len(TOKENS), engine.least_tokens):
        some = TOKENS[place : place + engine.least_tokens]
        if len(some) < engine.least_tokens:
            break
        alone = target_step(engine, some, place)["logits"]
        assert np.array_equal(whole[place : place + len(some)], alone), place
    if engine.info.states is not None:
        return
    target_step(engine, TOKENS, 0, row=1)
    last = len(TOKENS) - 1
    step = engine.step(0, 2, 1, len(TOKENS), 2)  # a token of each of two sequences
    step.inputs["tokens"][:] = TOKENS[last]
    step.inputs["positions"][:] = last
    step.inputs["write_index"][:] = last
    step.inputs["mask"][:] = True
    step.inputs["scored_tokens"][:] = [0, 1]
    step.run()
    assert np.array_equal(step.outputs["logits"], whole[[last, last]])


def test_a_file_whose_experts_alone_are_in_blocks_is_quantized(tmp_path: Path) -> None:
    """Such are gpt-oss' files with the other layers in 16 bits."""
    narrow = {"hidden_size": 48, "head_dim": 12, "intermediate_size": 64}
    config = GptOssConfig(**tiny.TARGET | narrow, num_experts_per_tok=3, num_local_experts=8)
    pair = write_pair(tmp_path, config, tiny.DRAFTER)
    file = ggufs.write(tmp_path / "model.gguf", pair.target_dir, Kind.MXFP4)
    weights = load_target(as_directory(file)).weights
    assert {kind: sizes.tensors for kind, sizes in weights.block_sizes().items()} == {"MXFP4": 4}
    assert weights.has_blocks


def test_gate_and_up_of_experts_in_one_tensor(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    pair = pair_of("qwen3moe")
    tensors = ggufs.kept_order(pair.target_dir)
    merged = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        both = [
            np.stack([tensors[f"{prefix}.{i}.{part}_proj.weight"] for i in range(8)])
            for part in ("gate", "up")
        ]
        merged[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    without = ("gate_proj.weight", "up_proj.weight")
    file = ggufs.write(tmp_path / "m.gguf", pair.target_dir, tensors=merged, without=without)
    weights = load_target(as_directory(file)).weights
    assert set(weights.names) == set(tensors)
    for tensor, values in tensors.items():
        assert np.array_equal(weights.read(tensor), values), tensor


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["mistral3", "gpt-oss", "gemma4", "gemma4-text", "qwen35"])
def test_queries_keys_and_values_in_one_tensor(
    pair_of: Callable[[str], Pair], tmp_path: Path, name: str, kind: Kind
) -> None:
    """As the converter writes them with --fuse-qkv."""
    target = pair_of(name).target_dir
    apart = load_target(as_directory(ggufs.write(tmp_path / "apart.gguf", target, kind)))
    file = ggufs.write(tmp_path / "fused.gguf", target, kind, fused=True)
    assert "blk.3.attn_v.weight" not in read_header(file).tensors
    model = load_target(as_directory(file))
    assert model.spec == apart.spec
    assert set(model.weights.names) == set(apart.weights.names)
    for tensor in apart.weights.names:
        assert model.weights.form(tensor) == apart.weights.form(tensor)
        assert np.array_equal(model.weights.read(tensor), apart.weights.read(tensor)), tensor


def test_fused_rows_that_are_not_of_the_heads(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    target = pair_of("mistral3").target_dir
    more = {"mistral3.attention.head_count": 5}
    file = ggufs.write(tmp_path / "m.gguf", target, fused=True, more=more)
    with pytest.raises(CheckpointError, match=r"attn_qkv.weight \[128, 96\] is not of 9 heads"):
        open_tensors(file)


def test_projections_as_older_files_of_qwen3_next_have_them(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    pair = pair_of("qwen3next")
    checkpoint = load_target(pair.target_dir)
    names = [name for name in checkpoint.weights.names if "in_proj_" in name]
    short = {"in_proj_qkvz": "ssm_in", "in_proj_ba": "ssm_ba"}
    grouped = {}
    for name in names:
        _, _, layer, _, projection, _ = name.split(".")
        grouped[f"blk.{layer}.{short[projection]}.weight"] = checkpoint.weights.read(name)
    without = ("attn_qkv.weight", "attn_gate.weight", "ssm_ba.weight")
    file = ggufs.write(tmp_path / "m.gguf", pair.target_dir, tensors=grouped, without=without)
    model = load_target(as_directory(file))
    assert model.spec.layers == checkpoint.spec.layers
    assert model.weights.names == checkpoint.weights.names
    for name in names:
        assert np.array_equal(model.weights.read(name), checkpoint.weights.read(name))


@pytest.mark.parametrize("given", [1, 2, 3])
def test_a_model_in_several_files(
    pair_of: Callable[[str], Pair], tmp_path: Path, given: int
) -> None:
    pair = pair_of("qwen3moe")
    whole = ggufs.write(tmp_path / "whole.gguf", pair.target_dir, Kind.Q8_0)
    first = ggufs.write(tmp_path / "model.gguf", pair.target_dir, Kind.Q8_0, parts=3)
    at = as_directory(first.with_name(f"model-{given:05}-of-00003.gguf"))
    model, expected = load_target(at), load_target(as_directory(whole))
    assert model.spec == expected.spec
    names = ["model.gguf", "model-00002-of-00003.gguf", "model-00003-of-00003.gguf"]
    assert [file.name for file in model.weights.files] == names
    for tensor in expected.weights.names:
        assert np.array_equal(model.weights.read(tensor), expected.weights.read(tensor)), tensor
    described = inspect(at)["target"]["weights"]
    assert described["tensors"] == inspect(as_directory(whole))["target"]["weights"]["tensors"]
    assert described["files"] == 3


def test_parts_behind_links(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    """The Hub's cache has links by name to files that are named by their digest."""
    first = ggufs.write(tmp_path / "model.gguf", pair_of("qwen3moe").target_dir, parts=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for i, part in enumerate(sorted(tmp_path.glob("model-*"))):
        part.rename(tmp_path / f"blob{i}")
        (snapshot / part.name).symlink_to(Path("..", f"blob{i}"))
    weights = load_target(as_directory(snapshot / first.name)).weights
    assert all(weights.read(name).size for name in weights.names)


def test_parts_that_do_not_fit(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    first = ggufs.write(tmp_path / "model.gguf", pair_of("qwen3moe").target_dir, parts=3)
    other = ggufs.write(tmp_path / "other.gguf", pair_of("mistral3").target_dir, parts=3)
    second, third = (first.with_name(f"model-{i:05}-of-00003.gguf") for i in (2, 3))
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.gguf is missing"):
        as_directory(first)
    shutil.copy(second, third)
    with pytest.raises(CheckpointError, match=r"part 3 of 3, but it says that it is number 1"):
        as_directory(second)
    shutil.copy(other.with_name("other-00003-of-00003.gguf"), third)
    with pytest.raises(CheckpointError, match="a part of another model than model-00001"):
        as_directory(first)
    third.write_bytes(kept[:-64])
    with pytest.raises(CheckpointError, match="truncated"):
        as_directory(first)
    third.write_bytes(kept)
    shutil.copy(first, tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="one of the 3 parts"):
        as_directory(tmp_path / "alone.gguf")


def test_layers_that_predict_further_tokens_are_left_out(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    pair = pair_of("qwen35")
    recurrent = [True, True, True, False, False]
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    more["qwen35.attention.recurrent_layers"] = recurrent
    further = {
        "blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
        "blk.4.attn_norm.weight": np.ones(64, np.float32),
    }
    plain = ggufs.write(tmp_path / "plain.gguf", pair.target_dir)
    file = ggufs.write(tmp_path / "m.gguf", pair.target_dir, more=more, tensors=further)
    at = as_directory(file)
    model, expected = load_target(at), load_target(as_directory(plain))
    assert model.spec == expected.spec
    assert model.weights.names == expected.weights.names
    assert left_out(plain) == []
    shutil.copy(plain, tmp_path / "mmproj-F16.gguf")
    [check] = [check for check in inspect(at)["checks"] if check["name"] == "target-tensors"]
    assert check["result"] == "warning"
    assert "layer 4, which predicts further tokens" in check["found"]
    assert "mmproj-F16.gguf beside it" in check["found"]


def test_vision_files_beside_a_link(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    """In the Hub's cache a model's files are links to a folder without names."""
    blob = ggufs.write(tmp_path / "blob", pair_of("mistral3").target_dir)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model-Q8_0.gguf").symlink_to(Path("..", blob.name))
    (snapshot / "mmproj-F16.gguf").touch()
    directory = as_directory(snapshot / "model-Q8_0.gguf")
    found = str(inspect(directory)["checks"])
    assert "mmproj-F16.gguf beside it" in found
    shutil.copy(snapshot / "mmproj-F16.gguf", tmp_path / "mmproj-other.gguf")
    assert [name.split()[-3] for name in left_out(directory / LINK)] == [
        "mmproj-F16.gguf",
        "mmproj-other.gguf",
    ]


@pytest.fixture
def patched(
    pair_of: Callable[[str], Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Mapping[str, Any]], Path]:
    """Return a function that changes what is read of a family's file."""

    def change(name: str, changed: Mapping[str, Any]) -> Path:
        header = read_header(ggufs.write(tmp_path / "tiny.gguf", pair_of(name).target_dir))
        header.values.update(changed)
        monkeypatch.setattr("dflash_trt.weights.gguf.directory.read_header", lambda file: header)
        return header.file

    return change


REFUSED: list[tuple[str, str, Any]] = [
    ("mistral3", "attention.temperature_scale", 0.1),
    ("mistral3", "rope.scaling.yarn_log_multiplier", 0.1),
    ("qwen3moe", "expert_shared_feed_forward_length", 64),
    ("qwen3moe", "expert_gating_func", 2),
    ("qwen3moe", "expert_weights_norm", False),
    ("qwen3moe", "attention.causal", False),
    ("qwen3moe", "rope.scaling.type", "longrope"),
    ("gpt-oss", "rope.scaling.yarn_attn_factor", 2.0),
    ("gpt-oss", "attention.sliding_window_pattern", [True]),
    ("gemma2", "rope.freq_base_swa", 1e5),
    ("gemma3", "attention.head_count_kv", [1, 2, 1, 2, 1, 2]),
    ("gemma3", "attn_logit_softcapping", 50.0),
    ("gemma4", "embedding_length_per_layer_input", 16),
    ("gemma4", "attention.shared_kv_layers", 2),
    ("gemma4", "expert_count", 8),
    ("gemma4", "attention.value_length", 8),
    ("qwen3next", "rope.dimension_sections", [11, 11, 10, 0]),
    ("qwen35", "expert_count", 8),
    ("qwen35", "attention.recurrent_layers", [True]),
    ("qwen35", "attention.scale", 2.0),
]


@pytest.mark.parametrize(("name", "key", "value"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(
    patched: Callable[[str, Mapping[str, Any]], Path], name: str, key: str, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=f"{name}.{key} is "):
        as_directory(patched(name, {f"{name}.{key}": value}))


def test_a_vision_file_is_no_target(patched: Callable[[str, Mapping[str, Any]], Path]) -> None:
    for changed in ({"general.architecture": "clip"}, {"general.type": "mmproj"}):
        with pytest.raises(CheckpointError, match="a vision or audio tower"):
            as_directory(patched("mistral3", changed))


def test_tensors_of_another_family_are_named(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    for name, tensor in (
        ("gemma3", "blk.0.ssm_out.weight"),
        ("gpt-oss", "blk.1.ffn_gate_up_exps.weight"),
        ("qwen35", "blk.0.attn_q.scale"),
        ("qwen3moe", "blk.2.ffn_down_exps.scale"),
    ):
        more = {tensor: np.ones((8, 64, 64), np.float32)}
        file = ggufs.write(tmp_path / f"{name}.gguf", pair_of(name).target_dir, tensors=more)
        checks = inspect(as_directory(file))["checks"]
        end = tensor.split(".", 2)[2].removesuffix(".weight")
        what = {"ffn_gate_up_exps": "experts.gate_proj_up_proj"}.get(end, end)
        assert any(what in str(check["found"]) for check in checks), name


def test_a_tensor_under_two_names(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    for name, tensor, shape in (
        ("qwen3next", "blk.0.ffn_norm.weight", (64,)),
        ("qwen3moe", "blk.1.ffn_gate_up_exps.weight", (8, 96, 64)),
    ):
        more = {tensor: np.ones(shape, np.float32)}
        file = ggufs.write(tmp_path / f"{name}.gguf", pair_of(name).target_dir, tensors=more)
        with pytest.raises(CheckpointError, match=f"and {tensor} are both model.layers"):
            open_tensors(file)


def test_other_divisors_of_frequencies_are_refused(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    file = ggufs.write(tmp_path / "tiny.gguf", pair_of("gemma4").target_dir)
    spoilt = bytearray(file.read_bytes())
    header = read_header(file)
    place = header.tensors["rope_freqs.weight"].data_offset
    spoilt[place : place + 4] = np.float32(2).tobytes()
    file.write_bytes(spoilt)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight does not divide"):
        as_directory(file)
