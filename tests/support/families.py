"""The target families and the forms of a drafter, each tiny, by name."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.support.pairs import Pair, write_pair, zlab_drafter

Fields = dict[str, Any]

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # gpt-oss's
ROPES: dict[str, Fields] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 128},
    "yarn-gpt-oss": YARN | {"factor": 32.0, ORIGINAL: 16},
    "yarn-kimi": {
        "rope_type": "yarn",
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        ORIGINAL: 64,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1 + i / 8 for i in range(16)],
        "long_factor": [9.0] * 16,
        ORIGINAL: 128,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}

SHAPE: Fields = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
HEADS = {"head_dim": 16}
TARGET = SHAPE | HEADS
WIDE = SHAPE | {"hidden_size": 96}  # its root is no round number: Gemma scales by it
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 10}
GEMMA = WIDE | HEADS | ALTERNATE | {"query_pre_attn_scalar": 24}
GEMMA3 = GEMMA | {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": ROPES["linear"] | {"rope_theta": 1e6},
    }
}
ROTATIONS = {"sliding_attention": 1e4, "full_attention": 1e6}
GEMMA3_1B = GEMMA | {  # of one kind, with another base
    "rope_parameters": {
        layers: {"rope_type": "default", "rope_theta": theta} for layers, theta in ROTATIONS.items()
    }
}
GEMMA4 = WIDE | HEADS | ALTERNATE | {"hidden_size_per_layer_input": 0, "global_head_dim": 32}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_MOE = TARGET | {"num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_experts": 8}
DENSE: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(
        **WIDE, **HEADS, rope_parameters=ROPES["llama3"] | {"rope_theta": 1e4}
    ),
    # half of the layers with a window, by the fields that were there before layer_types
    "qwen2": lambda: Qwen2Config(
        **WIDE,
        use_sliding_window=True,
        sliding_window=10,
        max_window_layers=2,
        rope_parameters=ROPES["yarn"] | {"rope_theta": 1e4},
    ),
    "mistral": lambda: MistralConfig(**WIDE, **HEADS, sliding_window=10),
    "gemma2": lambda: Gemma2Config(
        **GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=20.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA3_1B, final_logit_softcapping=20.0),
    "gemma3-with-vision": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(**GEMMA3), vision_config=VISION
    ),
    "gemma4": lambda: Gemma4TextConfig(**GEMMA4, final_logit_softcapping=20.0),
    # as the 31B: keys that are values too, and fewer of them, in the layers without a window
    "gemma4-31b": lambda: Gemma4Config(
        text_config=Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1)
    ),
}
MOE: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(**QWEN_MOE, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-moe-not-normalized": lambda: Qwen3MoeConfig(
        **QWEN_MOE, norm_topk_prob=False, decoder_sparse_step=2
    ),
    "gpt-oss": lambda: GptOssConfig(
        **TARGET | {"intermediate_size": 64},
        num_experts_per_tok=3,
        num_local_experts=8,
        sliding_window=10,
        swiglu_limit=2.5,
        swiglu_alpha=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            ORIGINAL: 64,
            "truncate": False,
        },
    ),
}
HYBRID = SHAPE | {  # every fourth layer has attention, whose heads are rotated by a quarter
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
HYBRID_MOE = {
    **{name: value for name, value in HYBRID.items() if name != "intermediate_size"},
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
HYBRIDS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-next": lambda: Qwen3NextConfig(
        **HYBRID_MOE, intermediate_size=96, mlp_only_layers=[1], norm_topk_prob=True
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**HYBRID),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(**HYBRID_MOE),
    # with names and stacked experts as in the published files
    "qwen3.5-with-vision": lambda: Qwen3_5Config(
        text_config=Qwen3_5TextConfig(**HYBRID), vision_config=TOWER
    ),
    "qwen3.5-moe-with-vision": lambda: Qwen3_5MoeConfig(
        text_config=Qwen3_5MoeTextConfig(**HYBRID_MOE), vision_config=TOWER
    ),
}
# the rows of the table in docs/models.md
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": DENSE["llama"],
    "qwen2": DENSE["qwen2"],
    "qwen3": lambda: Qwen3Config(**TARGET),
    "mistral": DENSE["mistral"],
    "gemma2": DENSE["gemma2"],
    "gemma3": DENSE["gemma3"],
    "gemma4": DENSE["gemma4-31b"],
    "qwen3-moe": MOE["qwen3-moe"],
    "gpt-oss": MOE["gpt-oss"],
    **{name: HYBRIDS[name] for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe")},
}
# of layers with attention alone
ATTENTION = [name for name in FAMILIES if name not in HYBRIDS]

OWN = {"mask_token_id": 319, "target_layer_ids": [0, 2]}
DRAFTER: Fields = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "block_size": 8,
    "dflash_config": OWN,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 10,
    "max_window_layers": 0,
}
BIASED = {
    "attention_bias": True,
    "rope_parameters": YARN | {"rope_theta": 150000.0, "factor": 4.0, ORIGINAL: 128},
    "block_size": None,
    "dflash_config": OWN | {"block_size": 6},
}
FORMS: dict[str, Fields] = {
    "sliding-causal": SLIDING,
    # smaller than the block, so that it cuts both ways
    "sliding-not-causal": SLIDING | {"sliding_window": 4, "is_causal": False},
    "all-causal": SLIDING | {"is_causal": True},
    "biases and YaRN, all in dflash_config": BIASED,  # as gpt-oss's drafters
    "scales, all at top level": {
        "dflash_config": {},
        **OWN,
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.6,
        "final_logit_softcapping": 7.0,
    },
}
# as the drafters published for Gemma 4, which scale the embedding as the target does
GEMMA4_DRAFTER = (
    DRAFTER
    | SLIDING
    | {
        "sliding_window": 20,
        "dflash_config": {
            "mask_token_id": 4,
            "target_layer_ids": [0, 1, 2],
            "input_embedding_scale": 96**0.5,
            "final_logit_softcapping": 20.0,
        },
    }
)
DFLASH2_TARGET = TARGET | {"num_hidden_layers": 5}
DFLASH2: Fields = (
    DRAFTER
    | SLIDING
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "is_causal": False,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": 319,
            "target_layer_ids": [0, 2, 3],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 16,
            "selector_top_k": 16,
        },
    }
)
# the columns of the table in docs/models.md
FORMATS: dict[str, Fields] = {
    "z-lab": DRAFTER | SLIDING,
    "modelopt": DRAFTER
    | {"dflash_config": OWN | {"use_swa": True, "swa_window_size": 10, "causal": True}},
    "speculators": DRAFTER,
    "dflash2": DFLASH2 | {"dflash_config": DFLASH2["dflash_config"] | OWN},
}
# each family that kinds for GPUs take, and each format once
CELLS = [(family, "z-lab") for family in ATTENTION]
CELLS += [("qwen3", form) for form in FORMATS if form != "z-lab"]


def pair_of(family: str, form: str, directory: Path, **options: Any) -> Pair:
    kind = DFlash2DraftModel if form == "dflash2" else DFlashDraftModel
    pair = write_pair(directory, FAMILIES[family](), FORMATS[form], drafter_class=kind, **options)
    if form == "dflash2":  # loading gives its codebooks the names that published drafters have
        zlab_drafter(pair.drafter_dir).save_pretrained(pair.drafter_dir)
    if form == "speculators":  # with a draft from the anchor's own row
        to_speculators(pair, directory / form, from_anchor=True, ids=range(320))
        pair = Pair(pair.target_dir, directory / form)
    return pair


def to_speculators(pair: Pair, directory: Path, *, from_anchor: bool, ids: Sequence[int]) -> None:
    """Rewrite a z-lab drafter as speculators' converter and trainer do (checked against samples).

    Tap ids are one higher; the head has rows `ids` of the target's.
    """
    config = json.loads((pair.drafter_dir / "config.json").read_text())
    own = config.pop("dflash_config")
    vocab = config["vocab_size"]
    tensors = load_file(pair.drafter_dir / "model.safetensors")
    if len(ids) < vocab:
        target = load_file(pair.target_dir / "model.safetensors")
        rows = torch.tensor(sorted(ids))
        tensors["lm_head.weight"] = target["lm_head.weight"][rows]
        tensors["d2t"] = rows - torch.arange(len(rows))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][rows] = True
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    written = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": config,
        "block_size": config.pop("block_size"),
        "draft_vocab_size": len(ids),
        "aux_hidden_state_layer_ids": [tap + 1 for tap in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "sample_from_anchor": from_anchor,
    }
    (directory / "config.json").write_text(json.dumps(written))


def make(name: str, directory: Path) -> Pair:
    """Make a pair by its family (`DENSE`, `MOE`, `HYBRIDS`) or drafter (`FORMS`, "dflash2")."""
    if name == "dflash2":
        target = LlamaConfig(**DFLASH2_TARGET)
        return write_pair(directory, target, DFLASH2, drafter_class=DFlash2DraftModel)
    if name in FORMS:
        return write_pair(directory, LlamaConfig(**TARGET), DRAFTER | FORMS[name])
    drafter = GEMMA4_DRAFTER if name == "gemma4-31b" else DRAFTER
    dtype = "bfloat16" if name == "gemma3-with-vision" else "float32"
    return write_pair(directory, (DENSE | MOE | HYBRIDS)[name](), drafter, dtype=dtype)
