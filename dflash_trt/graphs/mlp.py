"""The feed-forward half of a layer."""

import onnx_ir as ir

from dflash_trt.checkpoints.spec import DecoderSpec
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.layers import Layer, activation, linear, rms_norm
from dflash_trt.graphs.moe import mixture


def mlp_block(
    g: GraphBuilder, spec: DecoderSpec, weights: Weights, layer: Layer, hidden: ir.Value
) -> ir.Value:
    """Gated MLP, or a mixture of them, with residual; `hidden` is `[n, S, hidden_size]`."""
    mlp, wide = f"{layer.prefix}mlp", layer.spec.intermediate_size
    x = rms_norm(g, hidden, weights, f"{layer.prefix}post_attention_layernorm", spec)
    if layer.spec.experts is not None:
        return g.op("Add", hidden, mixture(g, spec, weights, layer, layer.spec.experts, x))
    both = linear(g, weights, x, f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=False)
    gate, up = g.split(both, (wide, wide), axis=-1)
    x = g.op("Mul", activation(g, spec, gate), up)
    return g.op("Add", hidden, linear(g, weights, x, f"{mlp}.down_proj", bias=False))
