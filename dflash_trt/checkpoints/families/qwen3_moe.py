"""Qwen3-MoE: Qwen3 with experts in place of most MLPs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.families.qwen3 import qwen3
from dflash_trt.checkpoints.fields import experts, number, refuse


def qwen3_moe(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    if config.get("use_sliding_window"):
        raise refuse(file, "attention has a window (use_sliding_window)")
    found = experts(file, config, normalised=bool(config.get("norm_topk_prob")))
    wide = number(file, config, "moe_intermediate_size")
    every = number(file, config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise refuse(file, f"mlp_only_layers is {dense!r}")
    fields = qwen3(file, config)
    layers = tuple(
        layer
        if i in dense or (i + 1) % every
        else replace(layer, experts=found, intermediate_size=wide)
        for i, layer in enumerate(fields["layers"])
    )
    return fields | {"layers": layers}
