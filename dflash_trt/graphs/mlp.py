"""The feed-forward half of a layer."""

import onnx_ir as ir

from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.convolution import convolve_after, convolve_before
from dflash_trt.graphs.layers import Layer, activation, linear, rms_norm
from dflash_trt.graphs.moe import mixture
from dflash_trt.graphs.positions import Positions


def mlp_block(g: GraphBuilder, layer: Layer, hidden: ir.Value, at: Positions) -> ir.Value:
    """Gated MLP, or a mixture of them, with residual; `hidden` is `[T, hidden_size]`."""
    mlp, wide = f"{layer.prefix}mlp", layer.spec.intermediate_size
    norm = "pre_feedforward" if g.spec.sandwich_norms else "post_attention"
    x = rms_norm(g, hidden, f"{layer.prefix}{norm}_layernorm")
    x, kernel = convolve_before(g, layer, "mlp_conv", x, at)
    if layer.spec.experts is not None:
        out = mixture(g, layer, layer.spec.experts, x)
    else:
        both = linear(g, x, f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=False)
        gate, up = g.split(both, (wide, wide), axis=-1)
        x = g.op("Mul", activation(g, gate), up)
        out = linear(g, x, f"{mlp}.down_proj", bias=False, summed=True)
    if g.spec.sandwich_norms:
        out = rms_norm(g, out, f"{layer.prefix}post_feedforward_layernorm")
    return g.op("Add", hidden, convolve_after(g, layer, out, kernel, at))
