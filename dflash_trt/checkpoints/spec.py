"""Specification of a model for the graphs; names are config.json's where it has one."""

from dataclasses import dataclass, field
from typing import Any, Literal

Shapes = dict[str, tuple[int, ...]]
Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: `rope_parameters` of one layer type."""

    theta: float
    dim: int  # rotated part of a head
    kind: str = "default"  # rope_type
    parameters: dict[str, Any] = field(default_factory=dict)  # of its kind: factor, ...
    attention_factor: float = 1.0  # multiplies cosines and sines


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """DFlash 2's dynamic causal convolutions over the block (`conv_kernel_size`, ...)."""

    kernel_size: int  # tokens, including its own
    group_size: int  # channels that share the token-dependent part of the kernel


@dataclass(frozen=True, kw_only=True)
class Selector:
    """DFlash 2's scores of pairs of neighboring candidates (`selector_rank`, ...)."""

    rank: int
    top_k: int  # candidates per position


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of an MLP; `intermediate_size` is per expert."""

    count: int  # num_experts
    per_token: int  # num_experts_per_tok
    normalized: bool  # the weights of a token's experts sum to 1 (norm_topk_prob)
    clamped: tuple[float, float] | None = None  # gpt-oss: swiglu_alpha and swiglu_limit


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer; fields that may differ between layers."""

    num_key_value_heads: int
    head_dim: int
    rope: Rope
    intermediate_size: int
    window: int | None = None  # sliding attention: positions that a query sees, including its own
    window_from_anchor: bool = False  # the window starts at the anchor for a drafter's whole block
    causal: bool = False  # within a drafter's block; a target's causality is in the mask
    value_is_key: bool = False  # no v_proj: values are the keys before norm and RoPE (Gemma 4)
    convolution: Convolution | None = None  # around attention and MLP
    experts: Experts | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    prefix: str = ""  # of every tensor except the head
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE
    biases: tuple[str, ...] = ()  # projections with a bias: q, k, v, o
    hidden_act: Activation = "silu"
    norm_offset: float = 0.0  # added to norm weights: 1 if stored around 0 (Gemma)
    sandwich_norms: bool = False  # norms before and after attention and MLP (Gemma)
    value_norm: bool = False  # RMSNorm over head_dim on v, without a weight (Gemma 4)
    layer_scalar: bool = False  # a stored factor on a layer's output (Gemma 4)
    embedding_scale: float = 1.0  # on embedded tokens; not on a tied head
    attention_scale: float | None = None  # on q k; None: head_dim ** -0.5
    attn_logit_softcapping: float | None = None
    output_multiplier: float = 1.0  # on the logits
    final_logit_softcapping: float | None = None
    # tensor with a score per head that takes part of the attention and adds nothing
    sinks: str | None = None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def num_logits(self) -> int:
        """Rows of the output head."""
        return self.vocab_size


@dataclass(frozen=True, kw_only=True)
class TargetSpec(DecoderSpec):
    model_type: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DrafterSpec(DecoderSpec):
    block_size: int  # most drafts of a block, plus 1
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # taps: 0 is the output of the target's first layer
    num_target_layers: int | None = None  # None: unknown
    sample_from_anchor: bool = False  # the anchor's place predicts the first draft: one mask less
    own_tables: tuple[str, ...] = ()  # of embed_tokens and lm_head; others are the target's
    draft_vocab_size: int | None = None  # rows of a reduced head (d2t)
    selector: Selector | None = None

    @property
    def num_logits(self) -> int:
        return self.draft_vocab_size or self.vocab_size


def layer_shapes(spec: DecoderSpec, index: int) -> Shapes:
    """Return tensor shapes of one decoder layer, [out, in] as stored."""
    layer, hidden = spec.layers[index], spec.hidden_size
    q, kv = (n * layer.head_dim for n in (spec.num_attention_heads, layer.num_key_value_heads))
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        **{f"mlp.{name}": shape for name, shape in _mlp_shapes(layer, hidden).items()},
    }
    if spec.sandwich_norms:
        for place in ("pre", "post"):
            shapes[f"{place}_feedforward_layernorm.weight"] = (hidden,)
    if spec.layer_scalar:
        shapes["layer_scalar"] = (1,)
    if layer.value_is_key:
        del shapes["self_attn.v_proj.weight"]
    for projection in spec.biases:
        weight = shapes[f"self_attn.{projection}_proj.weight"]
        shapes[f"self_attn.{projection}_proj.bias"] = (weight[0],)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (layer.head_dim,)
    if layer.convolution is not None:
        size, groups = layer.convolution.kernel_size, hidden // layer.convolution.group_size
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, size, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * size * groups, hidden)
    if spec.sinks is not None:
        shapes[f"self_attn.{spec.sinks}"] = (spec.num_attention_heads,)
    return {f"{spec.prefix}layers.{index}.{name}": shape for name, shape in shapes.items()}


def _mlp_shapes(layer: LayerSpec, hidden: int) -> Shapes:
    wide, experts = layer.intermediate_size, layer.experts
    plain: Shapes = {
        "gate_proj.weight": (wide, hidden),
        "up_proj.weight": (wide, hidden),
        "down_proj.weight": (hidden, wide),
    }
    if experts is None:
        return plain
    many = experts.count
    if experts.clamped is None:
        each = {f"experts.{i}.{name}": shape for i in range(many) for name, shape in plain.items()}
        return {"gate.weight": (many, hidden), **each}
    return {  # [in, out], gate and up interleaved
        "router.weight": (many, hidden),
        "router.bias": (many,),
        "experts.gate_up_proj": (many, hidden, 2 * wide),
        "experts.gate_up_proj_bias": (many, 2 * wide),
        "experts.down_proj": (many, wide, hidden),
        "experts.down_proj_bias": (many, hidden),
    }
