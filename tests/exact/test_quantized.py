"""Quantized checkpoints, written and read by the formats' own libraries.

ModelOpt's are in `trtllm/test_quantization.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Mxfp4Config,
    PreTrainedModel,
)
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from dflash_trt.errors import CheckpointError
from dflash_trt.weights import Weights, stored

pytestmark = pytest.mark.models
Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert matrices in parts that end within their blocks, as large ones are."""
    monkeypatch.setattr(stored, "CHUNK", 20_000)


def write(directory: Path, tensors: Tensors, quantization: object) -> Weights:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return Weights(directory, {"quantization_config": quantization})


def opened(directory: Path) -> Weights:
    return Weights(directory, json.loads((directory / "config.json").read_text()))


def floats(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().float().numpy()


def load(directory: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    experts = "model.layers.0.mlp.experts"
    for name in (f"{experts}.gate_up_proj", f"{experts}.down_proj"):
        count, wide, rows = tensors.pop(name).shape  # [experts, in, out]
        shape = (count, rows, wide // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.arange(blocks.numel() // 16).reshape(shape) % 253  # above: overflow
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales.to(torch.uint8)}
    save_file(tensors, file, metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    weights = opened(tmp_path)
    state = load(tmp_path, quantization_config=Mxfp4Config(dequantize=True)).state_dict()
    assert set(weights.names) == set(state)
    for name in weights.names:
        assert weights.shape(name) == tuple(state[name].shape)
        assert np.array_equal(weights.read(name).astype(np.float32), floats(state[name])), name
    assert weights.dtype(f"{experts}.down_proj") == "F32"
    assert weights.dtype(f"{experts}.down_proj_bias") == "BF16"


@pytest.mark.parametrize(
    ("scale_shape", "block", "suffix"),
    [
        ((3, 3), [128, 128], "_scale_inv"),  # the last blocks are cut off
        ((2, 3, 3), [128, 128], "_scale_inv"),  # a stack of experts
        ((), None, "_scale"),
        ((1,), None, "_scale_inv"),
        ((260, 1), None, "_scale"),
        ((260,), None, "_scale"),
        ((2, 260, 1), None, "_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_scales_of_every_shape(
    tmp_path: Path, scale_shape: tuple[int, ...], block: list[int] | None, suffix: str, dtype: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = scale_shape[:1] if len(scale_shape) == 3 else ()
    codes = torch.randn(*stack, 260, 290, generator=generator).to(torch.float8_e4m3fn)
    scales = (torch.rand(scale_shape, generator=generator) + 0.1).to(dtype)
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    weights = write(tmp_path, {"a.weight": codes, f"a.weight{suffix}": scales}, quantization)
    if scale_shape == (260,):
        scales = scales[:, None]
    expected = _dequantize_fp8_weight(codes, scales.float(), block, torch.float32)
    assert weights.names == ["a.weight"]
    assert np.array_equal(weights.read("a.weight"), expected.numpy())


REFUSED = yaml.safe_load(Path(__file__).with_name("refused_quantizations.yaml").read_text())


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["says"])
def test_other_methods_are_refused_by_name(tmp_path: Path, case: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=case["says"]):
        write(tmp_path, {"a.weight": torch.ones(2, 2)}, case["config"])


E4M3 = torch.float8_e4m3fn
MXFP4, NVFP4 = {"quant_method": "mxfp4"}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
ONE = torch.ones(1)


def codes(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(E4M3)


def whole(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


SCALES: list[tuple[Any, Tensors, str]] = [
    (None, {"a": codes(2, 2), "a_scale": ONE}, "a .* is F8_E4M3"),
    (FP8, {"a": codes(2, 2)}, "a .* is F8_E4M3"),
    (FP8, {"a": whole(2, 2, dtype=torch.int8), "a_scale": ONE}, "a .* is I8"),
    (FP8, {"a": codes(2), "a_scale": ONE}, "a .* is F8_E4M3"),
    (FP8, {"a": codes(256, 256), "a_scale_inv": torch.ones(2, 3)}, "not fit a "),
    (FP8, {"a": codes(2, 2), "a_scale": ONE.double()}, "not fit a "),
    (MXFP4, {"a_blocks": whole(2, 3, 16), "a_scales": whole(2, 2)}, "not fit a_blocks"),
    (MXFP4, {"a": ONE, "a_blocks": whole(2, 3, 16), "a_scales": whole(2, 3)}, "a twice, plain and"),
    (NVFP4, {"a": whole(2, 16), "a_scale": codes(2, 1), "a_scale_2": torch.ones(())}, "not fit a "),
    (NVFP4, {"a": whole(2, 16), "a_scale": codes(2, 2)}, "a .* is U8"),
]


@pytest.mark.parametrize(("quantization", "tensors", "says"), SCALES)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path, quantization: object, tensors: Tensors, says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        write(tmp_path, tensors, quantization)
