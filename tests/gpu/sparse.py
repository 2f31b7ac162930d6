"""Checkpoints of any size whose weights are holes in a file: they take no room, and read as 0."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """A Qwen3 target and its DFlash drafter."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int  # intermediate_size
    vocab: int
    block: int
    taps: tuple[int, ...]
    draft_layers: int
    longest: int  # tokens of a sequence


def write_sparse_pair(directory: Path, sizes: Sizes) -> None:
    """Write `directory/target` and `directory/drafter`, in bfloat16."""
    config = {
        "model_type": "qwen3",
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.wide,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": max(40960, sizes.longest),
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": sizes.vocab - 2,
    }
    target = config | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": sizes.layers,
    }
    drafter = config | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": sizes.draft_layers,
        "num_target_layers": sizes.layers,
        "layer_types": ["full_attention"] * sizes.draft_layers,
        "block_size": sizes.block,
        "dflash_config": {
            "mask_token_id": sizes.vocab - 1,
            "target_layer_ids": list(sizes.taps),
        },
    }
    table, size = (sizes.vocab, sizes.hidden), (sizes.hidden,)
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": size}
    shapes |= {"lm_head.weight": table} | _layers("model.", sizes.layers, sizes)
    _write(directory / "target", target, shapes)
    shapes = {"fc.weight": (sizes.hidden, len(sizes.taps) * sizes.hidden)}
    shapes |= {"hidden_norm.weight": size, "norm.weight": size}
    _write(directory / "drafter", drafter, shapes | _layers("", sizes.draft_layers, sizes))


def _layers(prefix: str, count: int, sizes: Sizes) -> Shapes:
    hidden, queries = sizes.hidden, sizes.heads * sizes.head_dim
    kept = sizes.kv_heads * sizes.head_dim
    of_layer: Shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (kept, hidden),
        "self_attn.v_proj": (kept, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (sizes.head_dim,),
        "self_attn.k_norm": (sizes.head_dim,),
        "mlp.gate_proj": (sizes.wide, hidden),
        "mlp.up_proj": (sizes.wide, hidden),
        "mlp.down_proj": (hidden, sizes.wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {
        f"{prefix}layers.{layer}.{name}.weight": shape
        for layer in range(count)
        for name, shape in of_layer.items()
    }


def _write(directory: Path, config: dict[str, object], shapes: Shapes) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
