"""The published pairs as stand-ins: real shapes, real names, no weights.

A stand-in is what `transformers` (targets) and z-lab's `dflash` (drafters) say of a model of the
published config: the library builds it on the meta device, its tensors' names are turned back into
those of a checkpoint, and the safetensors files get that header over a body that is one hole. The
files have their true size, and take a few MB of disk. Targets of families that nobody here reads
the tensors of (hybrids, latent attention) have the index of their shards only.

Fields are from the models' `config.json` on the Hub as collected in November 2026; those of a
drafter that were not seen (`max_position_embeddings`, the RoPE) follow its target. z-lab lets few
see the drafters of MiniMax-M2: theirs are its usual taps, the block of their cards, and what else
gives the size of their files. Left out: vision towers, next-token-prediction layers, text beyond a
small tokenizer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PretrainedConfig, Qwen3Config
from transformers.core_model_loading import revert_weight_conversion

from dflash_trt.checkpoints.families import FAMILIES

# z-lab's drafters on the Hub and their files in GiB: the 20 of its list, and the first of DFlash 2
PUBLISHED = {
    "z-lab/Qwen3-4B-DFlash-b16": 1.00,
    "z-lab/Qwen3-8B-DFlash-b16": 1.95,
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": 1.95,
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": 0.88,
    "z-lab/Qwen3-Coder-Next-DFlash": 0.88,
    "z-lab/gpt-oss-20b-DFlash": 1.46,
    "z-lab/gpt-oss-120b-DFlash": 1.46,
    "z-lab/Qwen3.5-4B-DFlash": 1.18,
    "z-lab/Qwen3.5-9B-DFlash": 2.41,
    "z-lab/Qwen3.5-27B-DFlash": 3.96,
    "z-lab/Qwen3.5-35B-A3B-DFlash": 0.72,
    "z-lab/Qwen3.5-122B-A10B-DFlash": 1.44,
    "z-lab/Qwen3.6-27B-DFlash": 3.22,
    "z-lab/Qwen3.6-35B-A3B-DFlash": 0.72,
    "z-lab/Kimi-K2.5-DFlash": 6.48,
    "z-lab/Kimi-K2.6-DFlash": 6.48,
    "z-lab/MiniMax-M2.5-DFlash": 3.33,
    "z-lab/MiniMax-M2.7-DFlash": 1.04,
    "z-lab/gemma-4-31B-it-DFlash": 2.86,
    "z-lab/gemma-4-26B-A4B-it-DFlash": 0.80,
    "z-lab/Qwen3.8-27B-DFlash2": 3.58,
}

COMMIT = "0" * 39 + "1"  # what `main` is in the stand-in cache
Tensor = tuple[str, tuple[int, ...]]  # the format's name of the dtype, shape
IMAGES = ("visual.", "vision_tower", "mm_projector", "embed_vision")
SIZES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True)
class Target:
    """`cls` and `config` are transformers'; `architecture` is what the Hub's config.json says."""

    hub: str
    cls: str
    config: PretrainedConfig
    mask: tuple[str, int]  # token of the tokenizer that the drafter has as its mask
    architecture: str | None = None
    quantised: str | None = None  # its experts are "mxfp4" or "nvfp4", its matrices "fp8"


@dataclass(frozen=True)
class Pair:
    """drafter: fields of its config.json beside what follows from the target."""

    target: Target
    drafter_hub: str
    drafter: Mapping[str, Any]
    second: bool = field(default=False)  # DFlash 2
    left_out: float = 0.0  # GiB of the drafter's file: its size is that of two tables more


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def _drafter(
    layers: int,
    intermediate: int,
    taps: tuple[int, ...],
    mask: int,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    block: int = 16,
    window: int | None = None,
    full: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """window: of all layers but the last `full`."""
    dflash = {"mask_token_id": mask, "target_layer_ids": list(taps)} | more.pop("dflash", {})
    fields = {
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "block_size": block,
        "dflash_config": dflash,
    }
    if window:
        fields |= {
            "use_sliding_window": True,
            "sliding_window": window,
            "layer_types": ["sliding_attention"] * (layers - full) + ["full_attention"] * full,
        }
    return fields | more


def _dense(hidden: int, intermediate: int, **more: Any) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        eos_token_id=151645,
        **_rope(1e6),
        **more,
    )


def _gpt_oss(layers: int, experts: int) -> Target:
    size = "120b" if layers == 36 else "20b"
    config = transformers.GptOssConfig(
        num_hidden_layers=layers, num_local_experts=experts, eos_token_id=200002
    )
    mask = ("<|reserved_200000|>", 200000)
    return Target(f"openai/gpt-oss-{size}", "GptOssForCausalLM", config, mask, quantised="mxfp4")


def _qwen35(hub: str, cls: str = "Qwen3_5ForConditionalGeneration", **text: Any) -> Target:
    """Qwen3.5 and later: three of four layers have linear attention."""
    kind = transformers.Qwen3_5MoeConfig if "Moe" in cls else transformers.Qwen3_5Config
    text |= {"max_position_embeddings": 262144, "eos_token_id": 248046}
    text |= _rope(1e7, partial_rotary_factor=0.25)
    text |= {"tie_word_embeddings": "4B" in hub}
    mask = ("<|fim_pad|>", 248070 if "3.8" in hub or "3.6-27B" in hub else 248077)
    return Target(hub, cls, kind(text_config=text, tie_word_embeddings="4B" in hub), mask)


def _gemma4(
    hub: str, hidden: int, intermediate: int, layers: int, heads: int, **more: Any
) -> Target:
    """Every sixth layer sees everything, with wider and fewer keys that are values too."""
    text = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        **more,
    }
    config = transformers.Gemma4Config(text_config=text, tie_word_embeddings=True)
    return Target(hub, "Gemma4ForConditionalGeneration", config, ("<mask>", 4))


def _kimi(hub: str) -> Target:
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "max_position_embeddings": 262144,
        "routed_scaling_factor": 2.827,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
    }
    config = transformers.Kimi_K25Config(text_config=text)
    return Target(
        hub,
        "Kimi_K25ForConditionalGeneration",
        config,
        ("[EOT_MASK]", 163838),
        "KimiK25ForConditionalGeneration",
        "nvfp4",
    )


def _minimax(hub: str, positions: int) -> Target:
    config = transformers.MiniMaxM2Config(max_position_embeddings=positions)
    mask = ("<|mask|>", 200054)
    return Target(hub, "MiniMaxM2ForCausalLM", config, mask, quantised="fp8")


QWEN3_MASK = ("<|MASK|>", 151669)
QWEN35_MOE = "Qwen3_5MoeForConditionalGeneration"
GPT_OSS = {"heads": 64, "head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5}
SWA = {"window": 4096, "dflash": {"block_size": 16}}
KIMI = {"heads": 64, "block": 8}
TAPS_KIMI = (1, 12, 24, 35, 47, 58)
TAPS_MINIMAX = (1, 16, 30, 44, 59)
TAPS_35B = (1, 6, 11, 16, 22, 27, 32, 37)

# by the name of the target in the folders of build_configs/
PAIRS = {
    "qwen3-4b": Pair(
        Target(
            "Qwen/Qwen3-4B",
            "Qwen3ForCausalLM",
            _dense(2560, 9728, tie_word_embeddings=True),
            QWEN3_MASK,
        ),
        "z-lab/Qwen3-4B-DFlash-b16",
        _drafter(5, 9728, (1, 9, 17, 25, 33), 151669),
    ),
    "qwen3-8b": Pair(
        Target(
            "Qwen/Qwen3-8B",
            "Qwen3ForCausalLM",
            _dense(4096, 12288, tie_word_embeddings=False),
            QWEN3_MASK,
        ),
        "z-lab/Qwen3-8B-DFlash-b16",
        _drafter(5, 12288, (1, 9, 17, 25, 33), 151669),
    ),
    "llama-3.1-8b": Pair(
        Target(
            "meta-llama/Llama-3.1-8B-Instruct",
            "LlamaForCausalLM",
            transformers.LlamaConfig(
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
                max_position_embeddings=131072,
                rms_norm_eps=1e-5,
                tie_word_embeddings=False,
                bos_token_id=128000,
                eos_token_id=[128001, 128008, 128009],
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            ),
            ("<|reserved_special_token_0|>", 128002),
        ),
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        _drafter(5, 12288, (1, 8, 15, 22, 29), 128002, block=10, rms_norm_eps=1e-5),
    ),
    "qwen3-coder-30b-a3b": Pair(
        Target(
            "Qwen/Qwen3-Coder-30B-A3B-Instruct",
            "Qwen3MoeForCausalLM",
            transformers.Qwen3MoeConfig(
                hidden_size=2048,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,
                moe_intermediate_size=768,
                num_experts=128,
                num_experts_per_tok=8,
                vocab_size=151936,
                max_position_embeddings=262144,
                tie_word_embeddings=False,
                eos_token_id=151645,
                **_rope(1e7),
            ),
            QWEN3_MASK,
        ),
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        _drafter(8, 6144, (1, 12, 23, 34, 45), 151669, kv_heads=4),
    ),
    "qwen3-coder-next": Pair(
        Target(
            "Qwen/Qwen3-Coder-Next",
            "Qwen3NextForCausalLM",
            transformers.Qwen3NextConfig(
                max_position_embeddings=262144,
                tie_word_embeddings=False,
                eos_token_id=151645,
                **_rope(5e6, partial_rotary_factor=0.25),
            ),
            QWEN3_MASK,
        ),
        "z-lab/Qwen3-Coder-Next-DFlash",
        _drafter(8, 6144, (3, 11, 23, 35, 43), 151669, kv_heads=4),
    ),
    "gpt-oss-20b": Pair(
        _gpt_oss(24, 32),
        "z-lab/gpt-oss-20b-DFlash",
        _drafter(8, 7680, (1, 6, 11, 16, 21), 200000, block=8, **GPT_OSS),
    ),
    "gpt-oss-120b": Pair(
        _gpt_oss(36, 128),
        "z-lab/gpt-oss-120b-DFlash",
        _drafter(8, 7680, (1, 9, 17, 25, 33), 200000, block=10, **GPT_OSS),
    ),
    "qwen3.5-4b": Pair(
        _qwen35("Qwen/Qwen3.5-4B", hidden_size=2560, intermediate_size=9216),
        "z-lab/Qwen3.5-4B-DFlash",
        _drafter(6, 9216, (1, 5, 9, 13, 17, 21, 25, 29), 248077, **SWA),
    ),
    "qwen3.5-9b": Pair(
        _qwen35("Qwen/Qwen3.5-9B"),
        "z-lab/Qwen3.5-9B-DFlash",
        _drafter(6, 12288, (1, 5, 9, 13, 17, 21, 25, 29), 248077, **SWA),
    ),
    "qwen3.5-27b": Pair(
        _qwen35(
            "Qwen/Qwen3.5-27B",
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            linear_num_value_heads=48,
        ),
        "z-lab/Qwen3.5-27B-DFlash",
        _drafter(6, 17408, (1, 10, 18, 27, 35, 44, 52, 61), 248077, **SWA),
    ),
    "qwen3.5-35b-a3b": Pair(
        _qwen35("Qwen/Qwen3.5-35B-A3B", QWEN35_MOE),
        "z-lab/Qwen3.5-35B-A3B-DFlash",
        _drafter(6, 6144, TAPS_35B, 248077, **SWA),
    ),
    "qwen3.5-122b-a10b": Pair(
        _qwen35(
            "Qwen/Qwen3.5-122B-A10B",
            QWEN35_MOE,
            hidden_size=3072,
            num_hidden_layers=48,
            num_attention_heads=32,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
            linear_num_value_heads=64,
        ),
        "z-lab/Qwen3.5-122B-A10B-DFlash",
        _drafter(6, 9216, (1, 7, 14, 20, 26, 32, 39, 45), 248077, **SWA),
    ),
    "qwen3.6-27b": Pair(
        _qwen35(
            "Qwen/Qwen3.6-27B",
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            linear_num_value_heads=48,
        ),
        "z-lab/Qwen3.6-27B-DFlash",
        _drafter(5, 17408, (1, 16, 31, 46, 61), 248070, window=2048),
    ),
    "qwen3.6-35b-a3b": Pair(
        _qwen35("Qwen/Qwen3.6-35B-A3B", QWEN35_MOE),
        "z-lab/Qwen3.6-35B-A3B-DFlash",
        _drafter(6, 6144, TAPS_35B, 248077, **SWA),
    ),
    "kimi-k2.5": Pair(
        _kimi("nvidia/Kimi-K2.5-NVFP4"),
        "z-lab/Kimi-K2.5-DFlash",
        _drafter(6, 18432, TAPS_KIMI, 163838, **KIMI),
    ),
    "kimi-k2.6": Pair(
        _kimi("nvidia/Kimi-K2.6-NVFP4"),
        "z-lab/Kimi-K2.6-DFlash",
        _drafter(6, 18432, TAPS_KIMI, 163838, **KIMI),
    ),
    "minimax-m2.5": Pair(
        _minimax("MiniMaxAI/MiniMax-M2.5", 196608),
        "z-lab/MiniMax-M2.5-DFlash",
        _drafter(5, 7680, TAPS_MINIMAX, 200054, block=8, window=4096),
        left_out=2 * 2 * 200064 * 3072 / (1 << 30),
    ),
    "minimax-m2.7": Pair(
        _minimax("MiniMaxAI/MiniMax-M2.7", 204800),
        "z-lab/MiniMax-M2.7-DFlash",
        _drafter(5, 7680, TAPS_MINIMAX, 200054, block=8),
    ),
    "gemma-4-31b": Pair(
        _gemma4(
            "google/gemma-4-31B-it",
            *(5376, 21504, 60, 32),
            num_key_value_heads=16,
            num_global_key_value_heads=4,
        ),
        "z-lab/gemma-4-31B-it-DFlash",
        _drafter(
            *(5, 10752, (1, 12, 23, 35, 46, 57), 4),
            heads=64,
            window=2048,
            final_logit_softcapping=30.0,
            dflash={"input_embedding_scale": 5376**0.5},
        ),
    ),
    "gemma-4-26b-a4b": Pair(
        _gemma4(
            "google/gemma-4-26B-A4B-it",
            *(2816, 2112, 30, 16),
            num_key_value_heads=8,
            num_global_key_value_heads=2,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
        "z-lab/gemma-4-26B-A4B-it-DFlash",
        _drafter(
            *(5, 5632, (1, 6, 11, 17, 22, 27), 4),
            window=2048,
            final_logit_softcapping=30.0,
            dflash={"input_embedding_scale": 2816**0.5},
        ),
    ),
    "qwen3.8-27b-dflash2": Pair(
        _qwen35(
            "Qwen/Qwen3.8-27B",
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            linear_num_value_heads=48,
        ),
        "z-lab/Qwen3.8-27B-DFlash2",
        _drafter(
            *(5, 17408, (5, 19, 33, 47, 61), 248070),
            block=8,
            window=2048,
            full=0,
            is_causal=False,
            dflash={
                "block_size": 8,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
        ),
        second=True,
    ),
}


def write_pair(cache: Path, pair: Pair, revisions: Mapping[str, str]) -> None:
    """Put both models into a Hub cache (`HF_HUB_CACHE`), at the revisions given by Hub id."""
    for hub, write in ((pair.target.hub, _write_target), (pair.drafter_hub, _write_drafter)):
        revision = revisions[hub]
        place = cache / f"models--{hub.replace('/', '--')}"
        commit = revision if len(revision) == 40 else COMMIT
        snapshot = place / "snapshots" / commit
        if snapshot.is_dir():
            continue
        snapshot.mkdir(parents=True)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        write(snapshot, pair)


def _write_target(directory: Path, pair: Pair) -> None:
    target = pair.target
    cls = getattr(transformers, target.cls)
    tensors = _tensors(cls, target.config)
    if target.quantised is not None:
        tensors = dict(each for item in tensors.items() for each in _quantised(target, *item))
    _write_config(directory, target)
    _write_shards(directory, tensors, headers=target.cls in FAMILIES)
    _write_tokenizer(directory, pair.target)


def _write_config(directory: Path, target: Target) -> None:
    config = json.loads(target.config.to_json_string(use_diff=False))
    config |= {"architectures": [target.architecture or target.cls], "dtype": "bfloat16"}
    if target.quantised == "mxfp4":
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        }
    if target.quantised == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        algorithm = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["*lm_head", "*self_attn*", "*shared_experts*", "*.layers.0.*"],
        }
        _write_json(directory / "hf_quant_config.json", {"quantization": algorithm})
    if target.quantised == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "float8_e4m3fn",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        }
    _write_json(directory / "config.json", config)
    ends = target.config.get_text_config().eos_token_id
    _write_json(directory / "generation_config.json", {"eos_token_id": ends})


def _write_drafter(directory: Path, pair: Pair) -> None:
    text = pair.target.config.get_text_config()
    shared = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "max_position_embeddings": text.max_position_embeddings,
        "num_target_layers": text.num_hidden_layers,
        "tie_word_embeddings": False,
        "rope_parameters": _drafter_rope(text.rope_parameters),
    }
    config = Qwen3Config(**shared | dict(pair.drafter))
    cls = DFlash2DraftModel if pair.second else DFlashDraftModel
    _write_file(directory / "model.safetensors", _tensors(cls, config))
    values = json.loads(config.to_json_string(use_diff=False))
    _write_json(directory / "config.json", values | {"architectures": [cls.__name__]})


def _drafter_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Of the full layers; a drafter turns all of a head."""
    rope = rope.get("full_attention", rope)
    kind = rope["rope_type"] if rope["rope_type"] in ("yarn", "llama3") else "default"
    return {k: v for k, v in rope.items() if k != "partial_rotary_factor"} | {"rope_type": kind}


def _tensors(cls: Any, config: PretrainedConfig) -> dict[str, Tensor]:
    """Names, dtypes and shapes as in a checkpoint that the library would write."""
    with torch.device("meta"):
        model = cls(config)
    state = revert_weight_conversion(model, model.state_dict())
    tied = getattr(config, "tie_word_embeddings", False)
    return {
        _stored_name(name): ("BF16", tuple(tensor.shape))
        for name, tensor in state.items()
        if not (tied and name == "lm_head.weight") and not any(part in name for part in IMAGES)
    }


def _stored_name(name: str) -> str:
    """What the library's way back leaves to do."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.removesuffix(".weight") if "_codebook" in name else name


def _quantised(target: Target, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """One plain tensor as the tensors it is stored as."""
    if target.quantised == "fp8":
        plain = name.endswith(("gate.weight", "embed_tokens.weight", "lm_head.weight"))
        if plain or len(tensor[1]) != 2:
            return [(name, tensor)]
        blocks = tuple(-(-size // 128) for size in tensor[1])
        return [(name, ("F8_E4M3", tensor[1])), (f"{name}_scale_inv", ("F32", blocks))]
    if ".experts." not in name or name.endswith("_bias"):
        return [(name, tensor)]
    if target.quantised == "mxfp4":  # experts, in, out -> experts, out, blocks of 32
        experts, wide, out = tensor[1]
        blocks = (experts, out, wide // 32)
        return [(f"{name}_blocks", ("U8", (*blocks, 16))), (f"{name}_scales", ("U8", blocks))]
    out, wide = tensor[1]
    return [
        (name, ("U8", (out, wide // 2))),
        (f"{name}_scale", ("F8_E4M3", (out, wide // 16))),
        (f"{name}_scale_2", ("F32", ())),
        (name.replace("weight", "input_scale"), ("F32", ())),
    ]


def _write_shards(directory: Path, tensors: Mapping[str, Tensor], *, headers: bool) -> None:
    """Two shards and their index; headers: False leaves the shards out."""
    names = list(tensors)
    half = len(names) // 2 + 1
    parts = {"model-00001-of-00002": names[:half], "model-00002-of-00002": names[half:]}
    places = {name: f"{file}.safetensors" for file, part in parts.items() for name in part}
    for file, part in parts.items() if headers else ():
        _write_file(directory / f"{file}.safetensors", {name: tensors[name] for name in part})
    size = sum(SIZES[dtype] * math.prod(shape) for dtype, shape in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_file(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A header over a body that is a hole."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)


def _write_tokenizer(directory: Path, target: Target) -> None:
    """Words of one letter, the end of text and the mask, at their true ids."""
    text = target.config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    token, mask = target.mask
    special = {f"<|end_{end}|>": end for end in ends} | {token: mask}
    words = {chr(97 + i): 100 + i for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(words | special, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", {"chat_template": CHAT})


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))
