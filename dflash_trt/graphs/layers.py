"""The pieces that the target and the drafter are both made of."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoints.spec import DecoderSpec
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.graphs.builder import GraphBuilder


@dataclass(frozen=True)
class Positions:
    """What attention needs to know about where its tokens are.

    cos, sin: float32 `[cache_len, head_dim / 2]`. queries: int64 `[n, Q]` and keys: int64
    `[n, K]`, absolute positions. write_index: int64 `[n]`, the cache row of the first key.
    mask: bool `[n, 1, Q, N]`, True where a query sees a cache row. visible: int64 `[1]`, N.
    """

    cos: ir.Value
    sin: ir.Value
    queries: ir.Value
    keys: ir.Value
    write_index: ir.Value
    mask: ir.Value
    visible: ir.Value


@dataclass(frozen=True)
class Layer:
    """One decoder layer's checkpoint names and its KV cache inputs."""

    index: int
    prefix: str
    key_cache: ir.Value
    value_cache: ir.Value
    cache_shape: tuple[str | int, ...]


def rope_tables(g: GraphBuilder, spec: DecoderSpec, length: int) -> tuple[ir.Value, ir.Value]:
    """Cosines and sines of the default rope, float32 `[length, head_dim / 2]`."""
    # float32 throughout, as transformers computes them: a float64 table differs in the last digit
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    frequencies = (1.0 / np.float32(spec.rope_theta) ** exponents).astype(np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies)
    return g.constant("rope_cos", np.cos(angles)), g.constant("rope_sin", np.sin(angles))


def open_layer(
    g: GraphBuilder, spec: DecoderSpec, index: int, prefix: str, cache_len: int
) -> Layer:
    """Declare the KV cache inputs `[n, kv_heads, cache_len, head_dim]` of one layer."""
    shape = ("n", spec.num_key_value_heads, cache_len, spec.head_dim)
    return Layer(
        index,
        f"{prefix}layers.{index}.",
        g.input(f"key_{index}", ir.DataType.FLOAT, shape),
        g.input(f"value_{index}", ir.DataType.FLOAT, shape),
        shape,
    )


def rms_norm(
    g: GraphBuilder, x: ir.Value, weights: Weights, name: str, spec: DecoderSpec
) -> ir.Value:
    """RMSNorm over the last axis with the checkpoint's weight."""
    scale = g.vector(weights, f"{name}.weight")
    return g.op("RMSNormalization", x, scale, axis=-1, epsilon=spec.rms_norm_eps)


def attention_block(
    g: GraphBuilder,
    spec: DecoderSpec,
    weights: Weights,
    layer: Layer,
    hidden: ir.Value,
    context: ir.Value | None,
    at: Positions,
) -> ir.Value:
    """Self-attention with residual; `hidden` is `[n, Q, hidden_size]`.

    `context` `[n, C, hidden_size]`, when given, is injected: it passes through k_proj and v_proj
    only, in front of the block's own keys and values (DFlash, KV injection). Keys and values are
    written to the cache at `at.write_index`; the mask alone decides which rows are seen.
    """
    attn = f"{layer.prefix}self_attn"
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    x = rms_norm(g, hidden, weights, f"{layer.prefix}input_layernorm", spec)
    if context is None:
        qkv = _project(g, spec, weights, x, *(f"{attn}.{p}_proj" for p in "qkv"))
        q, k, v = g.split(qkv, (heads, kv_heads, kv_heads), axis=1)
    else:
        q = _project(g, spec, weights, x, f"{attn}.q_proj")
        both = g.op("Concat", context, x, axis=1)
        kv = _project(g, spec, weights, both, f"{attn}.k_proj", f"{attn}.v_proj")
        k, v = g.split(kv, (kv_heads, kv_heads), axis=1)
    if spec.qk_norm:
        q = rms_norm(g, q, weights, f"{attn}.q_norm", spec)
        k = rms_norm(g, k, weights, f"{attn}.k_norm", spec)
    q = g.op("RotaryEmbedding", q, at.cos, at.sin, at.queries)
    k = g.op("RotaryEmbedding", k, at.cos, at.sin, at.keys)
    keys = _scatter(g, layer.key_cache, k, f"new_key_{layer.index}", at, layer.cache_shape)
    values = _scatter(g, layer.value_cache, v, f"new_value_{layer.index}", at, layer.cache_shape)
    mixed = g.op("Attention", q, keys, values, at.mask, scale=spec.head_dim**-0.5)
    mixed = g.op("Transpose", mixed, perm=(0, 2, 1, 3))
    mixed = g.op("Reshape", mixed, g.ints(0, 0, heads * spec.head_dim))
    out = g.op("MatMul", mixed, g.linear(weights, f"{attn}.o_proj.weight"))
    if spec.attention_bias:
        out = g.op("Add", out, g.bias(weights, f"{attn}.o_proj.bias"))
    return g.op("Add", hidden, out)


def mlp_block(
    g: GraphBuilder, spec: DecoderSpec, weights: Weights, layer: Layer, hidden: ir.Value
) -> ir.Value:
    """SwiGLU with residual."""
    mlp = f"{layer.prefix}mlp"
    x = rms_norm(g, hidden, weights, f"{layer.prefix}post_attention_layernorm", spec)
    both = g.op("MatMul", x, g.linear(weights, f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"))
    gate, up = g.split(both, (spec.intermediate_size, spec.intermediate_size), axis=-1)
    x = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
    x = g.op("MatMul", x, g.linear(weights, f"{mlp}.down_proj.weight"))
    return g.op("Add", hidden, x)


def head(
    g: GraphBuilder,
    spec: DecoderSpec,
    weights: Weights,
    norm: str,
    hidden: ir.Value,
    embedding: ir.Value,
    rows: ir.Value,
    best: int,
) -> None:
    """Final norm and output head, for `r` of the hidden states; declares the outputs.

    hidden `[n, S, hidden_size]`; embedding `[vocab, hidden_size]`; rows int64 `[r]`, which of the
    `n * S` hidden states get logits. Outputs: logits float32 `[r, vocab]`, and the `best` largest
    of each row in descending order as top_ids int64 and top_logits float32 `[r, best]`.
    """
    x = g.op("Reshape", hidden, g.ints(-1, spec.hidden_size))
    x = rms_norm(g, g.op("Gather", x, rows, axis=0), weights, norm, spec)
    # as stored: an embedding that is also the head is kept once on disk
    logits = g.op("MatMul", x, g.op("Transpose", embedding, perm=(1, 0)))
    # not ArgMax for the one best either: ONNX Runtime's is slower than its TopK
    values, ids = g.ops("TopK", logits, g.ints(best), outputs=2, axis=-1)
    g.output(logits, "logits", ir.DataType.FLOAT, ("r", spec.vocab_size))
    g.output(ids, "top_ids", ir.DataType.INT64, ("r", best))
    g.output(values, "top_logits", ir.DataType.FLOAT, ("r", best))


def _project(
    g: GraphBuilder, spec: DecoderSpec, weights: Weights, x: ir.Value, *names: str
) -> ir.Value:
    """Projections side by side, as heads: `[n, S, H]` to `[n, heads, S, head_dim]`."""
    out = g.op("MatMul", x, g.linear(weights, *(f"{name}.weight" for name in names)))
    if spec.attention_bias:
        out = g.op("Add", out, g.bias(weights, *(f"{name}.bias" for name in names)))
    out = g.op("Reshape", out, g.ints(0, 0, -1, spec.head_dim))
    return g.op("Transpose", out, perm=(0, 2, 1, 3))


def _scatter(
    g: GraphBuilder,
    cache: ir.Value,
    update: ir.Value,
    name: str,
    at: Positions,
    shape: tuple[str | int, ...],
) -> ir.Value:
    """Write rows into a cache in place and return the rows that the mask covers."""
    full = g.op("TensorScatter", cache, update, at.write_index, axis=-2, mode="linear")
    g.output(full, name, ir.DataType.FLOAT, shape)
    return g.op("Slice", full, g.ints(0), at.visible, g.ints(2))
