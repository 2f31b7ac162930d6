"""Shapes of a decoder's tensors, as its checkpoint has them."""

from dflash_trt.checkpoints.spec import DecoderSpec, DeltaNet, Experts, LayerSpec

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(spec: DecoderSpec, index: int) -> Shapes:
    """Return tensor shapes of one decoder layer, [out, in] as stored."""
    layer = spec.layers[index]
    hidden = spec.hidden_size
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"mlp.{name}": shape for name, shape in _mlp_shapes(layer, hidden).items()},
    }
    if layer.delta_net is None:
        for name, shape in _attention_shapes(spec, layer).items():
            shapes[f"self_attn.{name}"] = shape
    else:
        for name, shape in _delta_net_shapes(layer.delta_net, hidden).items():
            shapes[f"linear_attn.{name}"] = shape
    if spec.sandwich_norms:
        for place in ("pre", "post"):
            shapes[f"{place}_feedforward_layernorm.weight"] = (hidden,)
    if spec.layer_scalar:
        shapes["layer_scalar"] = (1,)
    if layer.convolution is not None:
        size = layer.convolution.kernel_size
        groups = hidden // layer.convolution.group_size
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, size, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * size * groups, hidden)
    return {f"{spec.prefix}layers.{index}.{name}": shape for name, shape in shapes.items()}


def _attention_shapes(spec: DecoderSpec, layer: LayerSpec) -> Shapes:
    hidden = spec.hidden_size
    q = spec.num_attention_heads * layer.head_dim
    kv = layer.num_key_value_heads * layer.head_dim
    shapes: Shapes = {
        "q_proj.weight": (2 * q if spec.attention_gate else q, hidden),
        "k_proj.weight": (kv, hidden),
        "v_proj.weight": (kv, hidden),
        "o_proj.weight": (hidden, q),
    }
    if layer.value_is_key:
        del shapes["v_proj.weight"]
    for projection in spec.biases:
        shapes[f"{projection}_proj.bias"] = (shapes[f"{projection}_proj.weight"][0],)
    if spec.qk_norm:
        shapes["q_norm.weight"] = (layer.head_dim,)
        shapes["k_norm.weight"] = (layer.head_dim,)
    if spec.sinks is not None:
        shapes[spec.sinks] = (spec.num_attention_heads,)
    return shapes


def _delta_net_shapes(net: DeltaNet, hidden: int) -> Shapes:
    heads = net.num_value_heads
    inputs: Shapes = {
        "in_proj_qkv.weight": (net.channels, hidden),
        "in_proj_z.weight": (net.values, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
    }
    if net.grouped:
        inputs = {
            "in_proj_qkvz.weight": (net.channels + net.values, hidden),
            "in_proj_ba.weight": (2 * heads, hidden),
        }
    return {
        **inputs,
        "conv1d.weight": (net.channels, 1, net.kernel_size),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (net.value_dim,),
        "out_proj.weight": (hidden, net.values),
    }


def _mlp_shapes(layer: LayerSpec, hidden: int) -> Shapes:
    wide = layer.intermediate_size
    experts = layer.experts
    plain: Shapes = {
        "gate_proj.weight": (wide, hidden),
        "up_proj.weight": (wide, hidden),
        "down_proj.weight": (hidden, wide),
    }
    if experts is None:
        return plain
    count = experts.count
    if experts.clamped is not None:
        return {  # [in, out], gate and up interleaved
            "router.weight": (count, hidden),
            "router.bias": (count,),
            "experts.gate_up_proj": (count, hidden, 2 * wide),
            "experts.gate_up_proj_bias": (count, 2 * wide),
            "experts.down_proj": (count, wide, hidden),
            "experts.down_proj_bias": (count, hidden),
        }
    shapes: Shapes = {"gate.weight": (count, hidden)}
    for expert in range(count):
        for name, shape in plain.items():
            shapes[f"experts.{expert}.{name}"] = shape
    return shapes | _shared_shapes(experts, hidden)


def _shared_shapes(experts: Experts, hidden: int) -> Shapes:
    if experts.shared is None:
        return {}
    return {
        "shared_expert.gate_proj.weight": (experts.shared, hidden),
        "shared_expert.up_proj.weight": (experts.shared, hidden),
        "shared_expert.down_proj.weight": (hidden, experts.shared),
        "shared_expert_gate.weight": (1, hidden),
    }
