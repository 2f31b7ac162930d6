"""Qwen3: Llama with a norm on queries and keys; Qwen3-MoE has experts in place of most MLPs."""

from dataclasses import replace
from typing import Any

from dflash_trt.checkpoints.fields import Config, decoder_fields, experts


def qwen3(config: Config) -> dict[str, Any]:
    return decoder_fields(config) | {"qk_norm": True}


def qwen3_moe(config: Config) -> dict[str, Any]:
    if config.get("use_sliding_window"):
        raise config.refuse("attention has a window (use_sliding_window)")
    found = experts(config, normalized=bool(config.get("norm_topk_prob")))
    wide, every = config.number("moe_intermediate_size"), config.number("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.refuse(f"mlp_only_layers is {dense!r}")
    fields = qwen3(config)
    layers = tuple(
        layer
        if i in dense or (i + 1) % every
        else replace(layer, experts=found, intermediate_size=wide)
        for i, layer in enumerate(fields["layers"])
    )
    return fields | {"layers": layers}
