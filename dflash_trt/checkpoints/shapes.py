"""Shapes of a decoder's tensors, as its checkpoint has them."""

from dflash_trt.checkpoints.spec import DecoderSpec, DeltaNet, Experts, LayerSpec

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(spec: DecoderSpec, index: int) -> Shapes:
    """Return tensor shapes of one decoder layer, [out, in] as stored."""
    layer, hidden = spec.layers[index], spec.hidden_size
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"mlp.{name}": shape for name, shape in _mlp_shapes(layer, hidden).items()},
    }
    if layer.delta_net is None:
        mixer, mixer_shapes = "self_attn", _attention_shapes(spec, layer)
    else:
        mixer, mixer_shapes = "linear_attn", _delta_net_shapes(layer.delta_net, hidden)
    shapes |= {f"{mixer}.{name}": shape for name, shape in mixer_shapes.items()}
    if spec.sandwich_norms:
        for place in ("pre", "post"):
            shapes[f"{place}_feedforward_layernorm.weight"] = (hidden,)
    if spec.layer_scalar:
        shapes["layer_scalar"] = (1,)
    if layer.convolution is not None:
        size, groups = layer.convolution.kernel_size, hidden // layer.convolution.group_size
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, size, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * size * groups, hidden)
    return {f"{spec.prefix}layers.{index}.{name}": shape for name, shape in shapes.items()}


def _attention_shapes(spec: DecoderSpec, layer: LayerSpec) -> Shapes:
    hidden = spec.hidden_size
    q, kv = (n * layer.head_dim for n in (spec.num_attention_heads, layer.num_key_value_heads))
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
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (layer.head_dim,)
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
        return {"gate.weight": (many, hidden), **each, **_shared_shapes(experts, hidden)}
    return {  # [in, out], gate and up interleaved
        "router.weight": (many, hidden),
        "router.bias": (many,),
        "experts.gate_up_proj": (many, hidden, 2 * wide),
        "experts.gate_up_proj_bias": (many, 2 * wide),
        "experts.down_proj": (many, wide, hidden),
        "experts.down_proj_bias": (many, hidden),
    }


def _shared_shapes(experts: Experts, hidden: int) -> Shapes:
    if experts.shared is None:
        return {}
    return {
        "shared_expert.gate_proj.weight": (experts.shared, hidden),
        "shared_expert.up_proj.weight": (experts.shared, hidden),
        "shared_expert.down_proj.weight": (hidden, experts.shared),
        "shared_expert_gate.weight": (1, hidden),
    }
