"""The target's graph: tokens in; logits and tap features out; KV caches in place."""

from collections.abc import Sequence

import onnx_ir as ir

from dflash_trt.checkpoints import Target
from dflash_trt.config import COPIED, Storage
from dflash_trt.engine_kinds import GraphKind
from dflash_trt.graphs.attention import attention_block
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.delta_net import delta_net_block, open_rollback
from dflash_trt.graphs.layers import Table, embed, head, open_layer
from dflash_trt.graphs.mlp import mlp_block
from dflash_trt.graphs.positions import Positions


def target_graph(
    target: Target,
    taps: Sequence[int],
    cache_len: int,
    kind: GraphKind = "onnxruntime",
    storage: Storage = COPIED,
    most_drafts: int = 0,
) -> GraphBuilder:
    """Build the graph of a target.

    Inputs: tokens, positions int64 `[n, S]`; write_index int64 `[n]`; mask bool `[n, 1, S, N]`;
    scored_tokens int64 `[r]`, tokens (of `n * S`) that get logits; `key_i`, `value_i` float32 `[n,
    kv_heads, cache_len, head_dim]`. Outputs: logits float32 `[r, vocab]` and each one's best (see
    `head`); features float32 `[n, S, taps * hidden_size]`, if there are taps; `new_key_i`,
    `new_value_i`, to be bound to the input caches. `taps` are `dflash_config.target_layer_ids`:
    feature l is the residual stream after decoder block l (z-lab `extract_context_feature`).

    A hybrid's caches are numbered among the layers of their kind; recurrent layers have `state_i`,
    `inputs_i` and `drafts_i` (`StateShapes`), and a step says how many tokens of each
    sequence are known and how many of the last drafts were accepted (`open_rollback`).
    most_drafts: of a hybrid, in one step.
    """
    g = GraphBuilder("target", target.spec, target.weights, kind, storage)
    spec = target.spec
    tokens = g.input("tokens", ir.DataType.INT64, ("n", "S"))
    positions = g.input("positions", ir.DataType.INT64, ("n", "S"))
    write_index = g.input("write_index", ir.DataType.INT64, ("n",))
    mask = g.input("mask", ir.DataType.BOOL, ("n", 1, "S", "N"))
    scored_tokens = g.input("scored_tokens", ir.DataType.INT64, ("r",))
    visible = g.op("Shape", mask, start=3, end=4)
    at = Positions(positions, positions, write_index, mask, visible, cache_len)
    rollback = open_rollback(g, tokens) if spec.delta_nets else None
    embedding = f"{spec.prefix}embed_tokens.weight"
    hidden = embed(g, Table(g.weights, embedding), tokens)
    after: dict[int, ir.Value] = {}
    for index in range(spec.num_hidden_layers):
        layer = open_layer(g, index, cache_len, most_drafts)
        if rollback is not None and layer.spec.delta_net is not None:
            hidden = delta_net_block(g, layer, hidden, at, rollback)
        else:
            hidden = attention_block(g, layer, hidden, None, at)
        hidden = mlp_block(g, layer, hidden, at)
        if spec.layer_scalar:
            hidden = g.op("Mul", hidden, g.vector(f"{layer.prefix}layer_scalar"))
        after[index] = hidden
    table = embedding if spec.tie_word_embeddings else "lm_head.weight"
    head(g, hidden, Table(g.weights, table), scored_tokens, best=1)
    if not taps:
        return g
    width = len(taps) * spec.hidden_size
    features = g.op("Concat", *(after[tap] for tap in taps), axis=-1)
    features = at.by_sequence(g, features, positions, width)
    g.output(features, "features", ir.DataType.FLOAT, ("n", "S", width))
    return g
