"""Specification of a model for the graphs; names are config.json's where it has one."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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
    shared: int | None = None  # width of a gated MLP beside them (shared_expert_intermediate_size)


class StateShapes(NamedTuple):
    """What a recurrent layer keeps of a slot, all float32 (`graphs/delta_net.py`)."""

    state: tuple[int, int, int]  # after all committed tokens but the last drafts
    inputs: tuple[int, int]  # of the convolution: of the tokens before the last drafts, and of them
    drafts: tuple[int, int]  # the last ones: key, value, decay and beta of each


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A Gated DeltaNet instead of attention; its state has a matrix per value head."""

    num_key_heads: int  # linear_num_key_heads; queries have as many
    num_value_heads: int  # linear_num_value_heads, a multiple of it
    key_dim: int  # linear_key_head_dim
    value_dim: int  # linear_value_head_dim
    kernel_size: int  # of the convolution over tokens, including their own (linear_conv_kernel_dim)
    grouped: bool  # rows of projections are stored by key head (Qwen3-Next), else by kind
    tiled: bool = False  # value heads that share a key head lie num_key_heads apart (llama.cpp)

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_shapes(self, most_drafts: int) -> StateShapes:
        heads = self.num_value_heads
        return StateShapes(
            state=(heads, self.key_dim, self.value_dim),
            inputs=(self.kernel_size - 1 + most_drafts, self.channels),
            drafts=(most_drafts, self.keys + self.values + 2 * heads),
        )


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
    delta_net: DeltaNet | None = None  # instead of attention, whose fields then mean nothing


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
    attention_gate: bool = False  # q_proj gives each head a gate of its output (Qwen3-Next)
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
    def attention_layers(self) -> tuple[LayerSpec, ...]:
        """The layers with a KV cache."""
        return tuple(layer for layer in self.layers if layer.delta_net is None)

    @property
    def delta_nets(self) -> tuple[DeltaNet, ...]:
        """Those of the layers with a recurrent state, in their order."""
        return tuple(layer.delta_net for layer in self.layers if layer.delta_net is not None)

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
