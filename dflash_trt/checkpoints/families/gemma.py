"""Gemma 2 and 3, text: norm weights around 1, four norms a layer, a scaled embedding."""

from typing import Any

from dflash_trt.checkpoints.fields import FULL, SLIDING, Config, decoder_fields, layer_types

GEMMA3 = {  # what a published config.json leaves out (transformers Gemma3TextConfig)
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA2 = GEMMA3 | {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def gemma2(config: Config) -> dict[str, Any]:
    config = config.over(GEMMA2)
    capping = config.optional("attn_logit_softcapping")
    return _gemma(config, every=2) | {"attn_logit_softcapping": capping}


def gemma3(config: Config) -> dict[str, Any]:
    """Local and global layers have a RoPE each, written in the old form or in the new."""
    config = config.over(GEMMA3)
    given, scaling = (config.section(f"rope_{name}") for name in ("parameters", "scaling"))
    ropes = {
        FULL: {"rope_theta": config.get("rope_theta", 1e6)} | scaling,
        SLIDING: {"rope_theta": config.get("rope_local_base_freq", 1e4)},
    }
    config["rope_parameters"] = {kind: own | given.section(kind) for kind, own in ropes.items()}
    every = config.number("sliding_window_pattern", 6)
    return _gemma(config, every) | {"qk_norm": True}


def _gemma(config: Config, every: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share; of `every` so many layers the last sees all."""
    if config.get("use_bidirectional_attention"):
        raise config.refuse("a token sees those after it (use_bidirectional_attention)")
    own = {
        "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "layer_types": layer_types(config, every),
    }
    fields = decoder_fields(config.under(own))
    return fields | {
        "tie_word_embeddings": config.get("tie_word_embeddings") is not False,
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "attention_scale": config.real("query_pre_attn_scalar") ** -0.5,
        "final_logit_softcapping": config.optional("final_logit_softcapping"),
    }
