"""LiLiCorr's head over a DFlash drafter: its marks, fields and tensors (arXiv 2608.20530).

As in TensorRT-LLM's `modeling_lilicorr.py`, vLLM's and SGLang's; the tensors as ModelOpt exports
them, `lilicorr.layers.0.mlp.0.weight` and so on.
"""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoints.fields import Config
from dflash_trt.checkpoints.spec import Corrector, Shapes

PREFIX = "lilicorr."
FEATURES = 5  # numbers that say how likely a candidate is
AS_PUBLISHED = "Use the config.json that came with the drafter"


def is_lilicorr(config: Mapping[str, Any]) -> bool:
    """By the marks that the three know; config: as it lies in the file, or flat."""
    inner = config.get("dflash_config")
    own = {**config, **inner} if isinstance(inner, Mapping) else config
    named = "LiLiCorrDraftModel" in str(own.get("architectures"))
    return named or own.get("projector_type") == "lilicorr" or own.get("lilicorr_enabled") is True


def read_corrector(values: Config) -> Corrector:
    """`lilicorr_*` of `dflash_config`; all but the width must be there."""
    hidden = values.number("lilicorr_hidden_size", least=0) or values.number("hidden_size")
    heads = values.number("lilicorr_num_heads")
    if hidden % heads:
        raise values.wrong(f"lilicorr_hidden_size {hidden} is no multiple of {heads}", AS_PUBLISHED)
    return Corrector(
        top_k=values.number("lilicorr_candidate_topk"),
        hidden_size=hidden,
        layers=values.number("lilicorr_num_layers"),
        heads=heads,
        intermediate_size=int(hidden * values.real("lilicorr_mlp_ratio")),
        factor_dim=values.number("lilicorr_factor_dim"),
        vector_eps=values.real("lilicorr_vector_eps"),
        logit_scale=values.real("lilicorr_logit_scale"),
    )


def corrector_shapes(head: Corrector, hidden_size: int, block_size: int) -> Shapes:
    """hidden_size: the drafter's."""
    own, wide = head.hidden_size, head.intermediate_size
    linear = {
        **({} if own == hidden_size else {"token_proj": (own, hidden_size)}),
        "pass_hidden_proj": (own, hidden_size),
        "context_proj": (own, hidden_size),
        "feature_mlp.1": (own, FEATURES),
        "feature_mlp.3": (own, own),
        "factor_input_proj": (own, 3 * own),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (head.factor_dim, own)),
    }
    shapes: Shapes = {
        "slot_embedding": (1, 1, block_size - 1, 1, own),
        "rank_embedding": (1, 1, 1, head.top_k, own),
        "relative_slot_bias": (head.heads, 2 * block_size - 1),
        "same_slot_bias": (head.heads,),
        "feature_mlp.0.weight": (FEATURES,),
        "feature_mlp.0.bias": (FEATURES,),
        "output_norm.weight": (own,),
        "anchor_norm.weight": (own,),
    }
    for i in range(head.layers):
        at = f"layers.{i}."
        shapes |= {f"{at}{name}_norm.weight": (own,) for name in ("attn", "mlp")}
        shapes |= {f"{at}attn.in_proj_weight": (3 * own, own), f"{at}attn.in_proj_bias": (3 * own,)}
        linear |= {f"{at}attn.out_proj": (own, own)}
        linear |= {f"{at}mlp.0": (wide, own), f"{at}mlp.2": (own, wide)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"{PREFIX}{name}": shape for name, shape in shapes.items()}
