"""The DFlash drafter's graph: injects tap features and fills a block of masks at once."""

import onnx_ir as ir

from dflash_trt.checkpoints import Drafter, DrafterSpec, Target, draft_token_ids
from dflash_trt.config import COPIED, Storage
from dflash_trt.graphs.attention import attention_block
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.dflash2 import pair_scores
from dflash_trt.graphs.layers import Table, embed, head, linear, open_layer, rms_norm
from dflash_trt.graphs.mlp import mlp_block
from dflash_trt.graphs.positions import Positions

CANDIDATES = 16  # best tokens of a draft; fewer would change speed, never texts


def candidates_per_draft(spec: DrafterSpec) -> int:
    return spec.selector.top_k if spec.selector else min(CANDIDATES, spec.num_logits)


def drafter_graph(
    drafter: Drafter, target: Target, cache_len: int, storage: Storage = COPIED
) -> GraphBuilder:
    """Build the drafter's graph (DFlash paper, section 4.1), with the target's tables or its own.

    Inputs: features float32 `[n, C, taps * hidden_size]` of tokens new to it; block int64 `[n,
    W]`, the anchor and W-1 mask tokens; positions int64 `[n, C + W]`, the features' first;
    write_index int64 `[n]`; mask bool `[n, 1, W, N]`; scored_tokens int64 `[r]`, block places (of
    `n * W`) that get logits; `key_i`, `value_i` float32 `[n, kv_heads, cache_len, head_dim]`.
    Outputs: logits float32 `[r, vocab]` and each one's candidates (see `head`), with a selector
    `pair_scores`; `new_key_i`, `new_value_i`, to be bound to the input caches.

    Keys and values of features and block are written to the cache together. The block's are invalid
    after the call: the next call overwrites them with its features.
    """
    spec = drafter.spec
    g = GraphBuilder("drafter", spec, drafter.weights, storage=storage)
    width = len(spec.target_layer_ids) * spec.hidden_size
    features = g.input("features", ir.DataType.FLOAT, ("n", "C", width))
    block = g.input("block", ir.DataType.INT64, ("n", "W"))
    positions = g.input("positions", ir.DataType.INT64, ("n", "C_W"))
    write_index = g.input("write_index", ir.DataType.INT64, ("n",))
    mask = g.input("mask", ir.DataType.BOOL, ("n", 1, "W", "N"))
    scored_tokens = g.input("scored_tokens", ir.DataType.INT64, ("r",))

    context_len = g.op("Shape", features, start=1, end=2)
    end = g.op("Shape", positions, start=1, end=2)
    block_positions = g.op("Slice", positions, context_len, end, g.ints(1))
    visible = g.op("Shape", mask, start=3, end=4)
    at = Positions(block_positions, positions, write_index, mask, visible, cache_len, context_len)
    # exact: a feature must not depend on how many there are
    context = g.op("Reshape", features, g.ints(-1, width))
    context = linear(g, context, "fc", bias=False, exact=True)
    context = rms_norm(g, context, "hidden_norm")
    shape = g.op("Concat", g.op("Shape", features, end=2), g.ints(spec.hidden_size), axis=0)
    context = g.op("Reshape", context, shape)
    embedding, output = _tables(g, spec, target)
    hidden = embed(g, embedding, block)  # with the drafter's own scale (z-lab)
    for index in range(spec.num_hidden_layers):
        layer = open_layer(g, index, cache_len)
        hidden = attention_block(g, layer, hidden, context, at)
        hidden = mlp_block(g, layer, hidden, at)
    token_ids = None
    if spec.draft_vocab_size is not None:
        token_ids = g.constant("token_ids", draft_token_ids(g.weights, spec))
    best = head(g, hidden, output, scored_tokens, candidates_per_draft(spec), token_ids)
    if spec.selector is not None:
        pair_scores(g, spec.selector, block, best)
    return g


def _tables(g: GraphBuilder, spec: DrafterSpec, target: Target) -> tuple[Table, Table]:
    """Return the tables of embedding and head, the drafter's or the target's."""
    embedding = Table(target.weights, f"{target.spec.prefix}embed_tokens.weight")
    output = embedding
    if not target.spec.tie_word_embeddings:
        output = Table(target.weights, "lm_head.weight")
    if "embed_tokens" in spec.own_tables:
        embedding = Table(g.weights, "embed_tokens.weight")
    if "lm_head" in spec.own_tables:
        output = Table(g.weights, "lm_head.weight")
    return embedding, output
