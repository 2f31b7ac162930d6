"""The target: the model whose output distribution is kept.

A family is a function from config.json to fields of TargetSpec; `_read` reads those common to all.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_trt.checkpoints.directory import has_tokenizer, load_tokenizer, special_tokens
from dflash_trt.checkpoints.fields import (
    FULL_ATTENTION,
    LINEAR,
    SLIDING,
    Config,
    decoder_fields,
    delta_net,
    experts,
    hybrid_layer_types,
    layer_types,
    rotary_share,
)
from dflash_trt.checkpoints.model import Target, open_model, unless_refused
from dflash_trt.checkpoints.shapes import Shapes, layer_shapes
from dflash_trt.checkpoints.spec import Experts, TargetSpec
from dflash_trt.errors import CheckpointError
from dflash_trt.request_schema import GenerateRequest, first_fault
from dflash_trt.weights.json_file import read_json
from dflash_trt.weights.weights import Weights

HEAD = "lm_head.weight"
# fields of generation_config.json, as in vLLM, to request fields
SAMPLING = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
# defaults that a published config.json omits (transformers Gemma3TextConfig, Gemma4TextConfig)
GEMMA3 = {
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
GEMMA4 = {
    "hidden_size_per_layer_input": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "rope_parameters": {
        SLIDING: {"rope_theta": 1e4},
        FULL_ATTENTION: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}


def load_target(directory: Path) -> Target:
    """Read JSON files and weight headers; CheckpointError if invalid or unsupported."""
    return unless_refused(open_target(directory))


def open_target(directory: Path) -> Target:
    """Read a target, which has a `refusal` if it is unsupported."""
    return open_model("target", directory, _read)


def _read(config: Config) -> tuple[TargetSpec, Weights]:
    directory = config.file.parent
    # text_config: in a multimodal model
    config = config.overridden_by(config.section("text_config").stated())
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    known = [name for name in named if isinstance(name, str) and name in FAMILIES]
    if not known:
        raise config.refuse(f"the architecture is {architectures}")
    fields = FAMILIES[known[0]](config)
    weights = Weights(directory, config)
    mixtures = [layer.experts for layer in fields["layers"] if layer.experts is not None]
    if any(mixture.clamped is None for mixture in mixtures):
        weights = weights.unstacked()
    common: dict[str, Any] = {"tie_word_embeddings": config.flag("tie_word_embeddings")}
    fields = common | {"prefix": _decoder_prefix(weights)} | fields
    # a stored head counts, as in transformers
    tied = fields.pop("tie_word_embeddings") and HEAD not in weights.names
    spec = TargetSpec(
        model_type=str(config.get("model_type", "")),
        tie_word_embeddings=tied,
        eos_token_ids=eos_token_ids(directory, fields["vocab_size"]),
        **fields,
    )
    return spec, weights


def _decoder_prefix(weights: Weights) -> str:
    """Return the prefix of the decoder's tensors, which depends on the library that saved them."""
    for prefix in ("language_model.model.", "model.language_model."):
        if f"{prefix}embed_tokens.weight" in weights.names:
            return prefix
    return "model."


def target_shapes(spec: TargetSpec) -> Shapes:
    shapes: Shapes = {
        f"{spec.prefix}embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        f"{spec.prefix}norm.weight": (spec.hidden_size,),
    }
    if not spec.tie_word_embeddings:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    for i in range(spec.num_hidden_layers):
        shapes |= layer_shapes(spec, i)
    return shapes


def eos_token_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return end tokens from all that transformers or vLLM read; CheckpointError if invalid."""
    config = Config(directory, read_json(directory / "config.json"))
    ids: list[Any] = []
    for place in (generation_config(directory), config, config.section("text_config")):
        stated = place.get("eos_token_id")
        if isinstance(stated, list):
            ids += stated
        elif stated is not None:
            ids.append(stated)
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{directory}: eos_token_id {token!r} is not a token of the vocabulary",
                "Correct eos_token_id in generation_config.json or config.json",
            )
    end = _tokenizer_end(directory)
    if end is not None and end < vocab_size:
        ids.append(end)
    return tuple(dict.fromkeys(ids))


def _tokenizer_end(directory: Path) -> int | None:
    if not has_tokenizer(directory):
        return None
    name = special_tokens(directory).get("eos_token")
    return load_tokenizer(directory).token_to_id(name) if name else None


def generation_config(directory: Path) -> dict[str, Any]:
    file = directory / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def sampling_defaults(directory: Path) -> tuple[dict[str, int | float], str]:
    """Return generation_config.json's sampling defaults by request field, and a problem or ""."""
    config = generation_config(directory)
    defaults = {}
    for key, name in SAMPLING.items():
        if config.get(key) is not None:
            defaults[name] = config[key]
    if defaults.get("top_k") == -1:
        defaults["top_k"] = 0  # both mean off
    try:
        GenerateRequest.model_validate(defaults)
    except ValidationError as error:
        field, problem = first_fault(error.errors())
        return {}, f"generation_config.json: {field} {problem}"
    return defaults, ""


def gemma2(config: Config) -> dict[str, Any]:
    config = config.with_defaults(GEMMA2)
    capping = config.positive_or_none("attn_logit_softcapping")
    fields = _gemma(config, layer_types(config, every=2))
    return fields | _gemma2_and_3(config) | {"attn_logit_softcapping": capping}


def gemma3(config: Config) -> dict[str, Any]:
    """Read Gemma 3: local and global layers have separate RoPEs, in the old or the new form."""
    config = config.with_defaults(GEMMA3)
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling")
    ropes = {
        FULL_ATTENTION: {"rope_theta": config.get("rope_theta", 1e6)} | scaling,
        SLIDING: {"rope_theta": config.get("rope_local_base_freq", 1e4)},
    }
    config["rope_parameters"] = {
        kind: rope | parameters.section(kind) for kind, rope in ropes.items()
    }
    kinds = layer_types(config, config.number("sliding_window_pattern", 6))
    return _gemma(config, kinds) | _gemma2_and_3(config) | {"qk_norm": True}


def _gemma2_and_3(config: Config) -> dict[str, Any]:
    scale = config.positive("query_pre_attn_scalar") ** -0.5
    return {"norm_offset": 1.0, "attention_scale": scale}


def _gemma(config: Config, kinds: list[str], *two_sided: str, **overrides: Any) -> dict[str, Any]:
    """Read fields common to all; two_sided: inputs other than text."""
    if config.get("use_bidirectional_attention") not in (None, False, *two_sided):
        raise config.refuse("a token sees those after it (use_bidirectional_attention)")
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    overrides |= {"hidden_act": activation, "layer_types": kinds}
    fields = decoder_fields(config.overridden_by(overrides))
    return fields | {
        "tie_word_embeddings": config.get("tie_word_embeddings") is not False,
        "sandwich_norms": True,
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "final_logit_softcapping": config.positive_or_none("final_logit_softcapping"),
    }


def gemma4(config: Config) -> dict[str, Any]:
    config = Config(config.file, GEMMA4 | config.stated())
    for name, what in (
        ("hidden_size_per_layer_input", "each layer has an embedding of its own"),
        ("num_kv_shared_layers", "layers share keys and values"),
        ("enable_moe_block", "layers have experts"),
    ):
        if config.get(name):
            raise config.refuse(f"{what} ({name})")
    # the last layer always, as in transformers
    kinds = [*layer_types(config, every=6)[:-1], FULL_ATTENTION]
    shared = bool(config.get("attention_k_eq_v"))
    wide = {"head_dim": config.number("global_head_dim")}
    if shared:
        fewer = config.number("num_key_value_heads")
        wide["num_key_value_heads"] = config.number("num_global_key_value_heads", fewer)
    by_index = {str(i): wide for i, kind in enumerate(kinds) if kind == FULL_ATTENTION}
    by_layer = config.get("per_layer_config") or by_index
    fields = _gemma(config, kinds, "vision", per_layer_config=by_layer)
    layers = tuple(
        replace(layer, value_is_key=shared and layer.window is None) for layer in fields["layers"]
    )
    return fields | {
        "layers": layers,
        "qk_norm": True,
        "value_norm": True,
        "layer_scalar": True,
        "attention_scale": 1.0,
    }


def gpt_oss(config: Config) -> dict[str, Any]:
    overrides = {
        "attention_bias": config.get("attention_bias", True),
        "layer_types": layer_types(config, every=2),
    }
    fields = decoder_fields(config.overridden_by(overrides))
    clamped = (config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0))
    mixture = replace(experts(config, normalized=True), clamped=clamped)
    layers = tuple(replace(layer, experts=mixture) for layer in fields["layers"])
    return fields | {"prefix": "model.", "layers": layers, "sinks": "sinks"}


def mistral(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)  # transformers' default is 4096; null is no window
    kinds = [FULL_ATTENTION if window is None else SLIDING] * config.number("num_hidden_layers")
    return decoder_fields(config.overridden_by({"sliding_window": window, "layer_types": kinds}))


def qwen2(config: Config) -> dict[str, Any]:
    return decoder_fields(config) | {"biases": ("q", "k", "v")}


def qwen3(config: Config) -> dict[str, Any]:
    return decoder_fields(config) | {"qk_norm": True}


def qwen3_moe(config: Config) -> dict[str, Any]:
    if config.get("use_sliding_window"):
        raise config.refuse("attention has a window (use_sliding_window)")
    sparse = experts(config, normalized=bool(config.get("norm_topk_prob")))
    return _with_experts(config, qwen3(config), sparse)


def _with_experts(config: Config, fields: dict[str, Any], sparse: Experts) -> dict[str, Any]:
    """Put experts into the layers that are not listed as dense."""
    wide = config.number("moe_intermediate_size")
    every = config.number("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.refuse(f"mlp_only_layers is {dense!r}")
    layers = list(fields["layers"])
    for i, layer in enumerate(layers):
        if i not in dense and (i + 1) % every == 0:
            layers[i] = replace(layer, experts=sparse, intermediate_size=wide)
    return fields | {"layers": tuple(layers)}


def qwen3_next(config: Config) -> dict[str, Any]:
    grouped = not config.flag("linear_projections_by_kind")  # of a GGUF file
    fields = _hybrid(config, grouped=grouped)
    return _with_experts(config, fields, _with_shared(config, config.flag("norm_topk_prob", True)))


def qwen3_5(config: Config) -> dict[str, Any]:
    """Read Qwen3.5, 3.6 and 3.8, text only.

    All have this name: Qwen3.6 by transformers' page of the model, Qwen3.8-27B by its config.json
    as public notes of 2026-08-14 quote it. Their mrope equals the plain RoPE for text.
    """
    return _hybrid(config, grouped=False)


def qwen3_5_moe(config: Config) -> dict[str, Any]:
    wide = {"intermediate_size": config.number("moe_intermediate_size")}
    config = config.overridden_by({"mlp_only_layers": None, "decoder_sparse_step": None})
    fields = _hybrid(config.overridden_by(wide), grouped=False)
    return _with_experts(config, fields, _with_shared(config, True))


def _with_shared(config: Config, normalized: bool | None) -> Experts:
    sparse = experts(config, normalized=bool(normalized))
    return replace(sparse, shared=config.number("shared_expert_intermediate_size"))


def _hybrid(config: Config, *, grouped: bool) -> dict[str, Any]:
    """Read what families with Gated DeltaNets have in common; grouped: see `DeltaNet`."""
    if config.flag("attn_output_gate", True) is False:
        raise config.refuse("attention has no gate (attn_output_gate)")
    if config.get("hidden_act") not in (None, "silu"):
        raise config.refuse(f"hidden_act is {config.get('hidden_act')!r}")
    kinds = hybrid_layer_types(config)
    net = delta_net(config, grouped=grouped)
    share, whole = rotary_share(config.with_defaults({"head_dim": 256}), 0.25)
    fields = decoder_fields(whole.overridden_by({"layer_types": [FULL_ATTENTION] * len(kinds)}))
    rotated = int(share * fields["layers"][0].head_dim)
    if rotated < 2 or rotated % 2:
        raise config.wrong(f"RoPE covers {rotated} numbers of a head (partial_rotary_factor)")
    layers = tuple(
        replace(
            layer,
            rope=replace(layer.rope, dim=rotated),
            delta_net=net if kind == LINEAR else None,
        )
        for layer, kind in zip(fields["layers"], kinds, strict=True)
    )
    return fields | {
        "layers": layers,
        "qk_norm": True,
        "norm_offset": 1.0,
        "attention_gate": True,
    }


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {  # by architecture
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4,
    "GptOssForCausalLM": gpt_oss,
    "LlamaForCausalLM": decoder_fields,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
}
