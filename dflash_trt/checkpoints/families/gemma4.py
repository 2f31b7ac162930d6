"""The text part of Gemma 4, where every layer has its own keys and values and no experts."""

from dataclasses import replace
from typing import Any

from dflash_trt.checkpoints.fields import FULL, SLIDING, Config, decoder_fields, layer_types

DEFAULTS = {  # transformers Gemma4TextConfig
    "hidden_size_per_layer_input": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "rope_parameters": {
        SLIDING: {"rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}


def gemma4(config: Config) -> dict[str, Any]:
    config = Config(config.file, DEFAULTS | config.stated())
    for name, what in (
        ("hidden_size_per_layer_input", "each layer has an embedding of its own"),
        ("num_kv_shared_layers", "layers share keys and values"),
        ("enable_moe_block", "layers have experts"),
    ):
        if config.get(name):
            raise config.refuse(f"{what} ({name})")
    if config.get("use_bidirectional_attention") == "all":
        raise config.refuse("a token sees those after it (use_bidirectional_attention)")
    kinds = [*layer_types(config, every=6)[:-1], FULL]  # the last always, as in transformers
    shared = bool(config.get("attention_k_eq_v"))
    wide = {"head_dim": config.number("global_head_dim")}
    if shared:
        fewer = config.number("num_key_value_heads")
        wide["num_key_value_heads"] = config.number("num_global_key_value_heads", fewer)
    by_index = {str(i): wide for i, kind in enumerate(kinds) if kind == FULL}
    own = {
        "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "layer_types": kinds,
        "per_layer_config": config.get("per_layer_config") or by_index,
    }
    fields = decoder_fields(config.under(own))
    layers = (replace(x, value_is_key=shared and x.window is None) for x in fields["layers"])
    return fields | {
        "layers": tuple(layers),
        "tie_word_embeddings": config.get("tie_word_embeddings") is not False,
        "qk_norm": True,
        "value_norm": True,
        "sandwich_norms": True,
        "layer_scalar": True,
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "attention_scale": 1.0,
        "final_logit_softcapping": config.optional("final_logit_softcapping"),
    }
