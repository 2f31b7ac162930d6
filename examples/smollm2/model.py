"""The drafter in plain PyTorch: its start from the target, its blocks, its loss, and its files."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llama import TAPS, Llama, read, rms_norm, rotated
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "pycode"))
from blocks import block_mask, position_weights

BLOCK = 8  # the anchor and the drafts after it
DRAFTS = BLOCK - 1
MASK = 16  # <empty_output>, which no chat has
LAYERS = 3
DRAFT_VOCABULARY = 12_288
RANK, CANDIDATES = 32, 16  # of the candidate selector
HARD = 0.5  # share of the text's own token in the loss; the rest follows the target's likeliest
TOP = 16  # of the likeliest
ALONE = 0.4  # share of the loss of the drafter without its selector, which only ranks candidates
AWARE = 0.5  # share of the weights that follow the expected number of rounds
SELECTOR = "candidate_selector."
Weights = dict[str, Tensor]


@dataclass
class Batch:
    """Right-padded conversations, and where blocks begin in their answers."""

    ids: Tensor  # int64 [rows, length]
    lengths: Tensor  # int64 [rows]
    anchors: Tensor  # int64 [rows, anchors]


@dataclass
class Vocabulary:
    """The tokens that the drafter may propose: row r of its head is the target's `ids[r]`."""

    ids: Tensor  # int64 [rows]
    row: Tensor  # int64 [vocabulary]; -1: never proposed
    head: Tensor  # [rows, hidden]


def vocabulary_of(ids: Tensor, llama: Llama) -> Vocabulary:
    row = torch.full((len(llama.embedding),), -1, device=ids.device)
    row[ids] = torch.arange(len(ids), device=ids.device)
    return Vocabulary(ids, row, llama.embedding[ids])


@torch.no_grad()
def start_from_target(llama: Llama, features: Tensor) -> Weights:
    """Return float32 weights: the target's last layers, and a `fc` that passes the deepest tap on.

    It divides each channel by its size: some of the target's are thousands of times larger.
    """
    hidden, device = llama.embedding.shape[1], llama.embedding.device
    size = features.float().square().mean(0).sqrt().clamp_min(1e-3)
    fc = torch.randn(hidden, len(size)) * 0.02
    fc[:, -hidden:] += torch.eye(hidden)
    weights = {
        "fc.weight": fc.to(device) / size,
        "hidden_norm.weight": torch.ones(hidden, device=device),
    }
    sizes = [llama.heads * llama.head_dim] + 2 * [llama.kv_heads * llama.head_dim]
    for number, source in enumerate(llama.layers[-LAYERS:]):
        query, key, value = source.qkv.split(sizes)
        gate, up = source.gate_up.chunk(2)
        of = {
            "input_layernorm": source.attention_norm,
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": source.output,
            "self_attn.q_norm": torch.full((llama.head_dim,), 1.5),
            "self_attn.k_norm": torch.full((llama.head_dim,), 1.5),
            "post_attention_layernorm": source.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": source.down,
        }
        weights |= {f"layers.{number}.{name}.weight": tensor for name, tensor in of.items()}
    weights["norm.weight"] = llama.norm
    tokens = len(llama.embedding)
    weights |= {
        f"{SELECTOR}hidden_projection.weight": torch.randn(RANK, hidden) * hidden**-0.5,
        f"{SELECTOR}predecessor_codebook": torch.randn(tokens, RANK) * 0.1,
        f"{SELECTOR}successor_codebook": torch.randn(tokens, RANK) * 0.1,
    }
    return {name: tensor.to(device, torch.float32).clone() for name, tensor in weights.items()}


def layer_count(weights: Weights) -> int:
    return sum(name.endswith("self_attn.q_proj.weight") for name in weights)


def block_states(
    weights: Weights, llama: Llama, features: Tensor, ids: Tensor, anchors: Tensor
) -> Tensor:
    """Return hidden states `[rows, anchors, DRAFTS, hidden]` of each block's drafts.

    A block sees the context before its anchor, whose own features do not exist yet when it is
    drafted, and itself in both directions.
    """
    rows, count = anchors.shape
    length, device = ids.shape[1], ids.device
    offsets = torch.arange(BLOCK, device=device)
    positions = (anchors[:, :, None] + offsets).flatten(1)
    first = ids.gather(1, anchors)
    tokens = torch.where(offsets == 0, first[:, :, None], MASK).flatten(1)
    hidden = F.embedding(tokens, llama.embedding)
    dtype, queries = hidden.dtype, count * BLOCK
    cosines, sines = llama.rotations
    own = cosines[positions][:, None], sines[positions][:, None]
    before = cosines[:length], sines[:length]
    visible = block_mask(anchors, length, BLOCK)
    width = visible.shape[-1]
    padded = -(-width // 8) * 8  # what the fused kernels ask of a mask's rows
    mask = torch.full((rows, 1, queries, padded), -torch.inf, dtype=dtype, device=device)
    mask[..., :width].masked_fill_(visible, 0)
    mask = mask[..., :width].expand(-1, llama.heads, -1, -1)
    group, epsilon = llama.heads // llama.kv_heads, llama.epsilon

    def product(states: Tensor, name: str) -> Tensor:
        return F.linear(states, weights[f"{name}.weight"].to(dtype))

    def heads(states: Tensor) -> Tensor:
        return states.view(rows, states.shape[1], -1, llama.head_dim).transpose(1, 2)

    context = rms_norm(product(features, "fc"), weights["hidden_norm.weight"], epsilon)
    for number in range(layer_count(weights)):
        at = f"layers.{number}."
        attention = f"{at}self_attn."
        norm = weights[f"{attention}q_norm.weight"], weights[f"{attention}k_norm.weight"]
        states = rms_norm(hidden, weights[f"{at}input_layernorm.weight"], epsilon)
        query = rms_norm(heads(product(states, f"{attention}q_proj")), norm[0], epsilon)
        key = [heads(product(each, f"{attention}k_proj")) for each in (context, states)]
        key = [rms_norm(each, norm[1], epsilon) for each in key]
        key = [rotated(key[0], *before), rotated(key[1], *own)]
        value = [heads(product(each, f"{attention}v_proj")) for each in (context, states)]
        mixed = F.scaled_dot_product_attention(
            rotated(query, *own),
            torch.cat(key, dim=2).repeat_interleave(group, 1),
            torch.cat(value, dim=2).repeat_interleave(group, 1),
            attn_mask=mask,
        )
        hidden = hidden + product(mixed.transpose(1, 2).flatten(2), f"{attention}o_proj")
        states = rms_norm(hidden, weights[f"{at}post_attention_layernorm.weight"], epsilon)
        gated = F.silu(product(states, f"{at}mlp.gate_proj")) * product(states, f"{at}mlp.up_proj")
        hidden = hidden + product(gated, f"{at}mlp.down_proj")
    hidden = rms_norm(hidden, weights["norm.weight"], epsilon)
    return hidden.view(rows, count, BLOCK, -1)[:, :, 1:]


def selector_scores(
    weights: Weights, hidden: Tensor, predecessors: Tensor, successors: Tensor
) -> Tensor:
    """Return the selector's scores of tokens with codes `successors` `[..., RANK]`."""
    dtype = hidden.dtype
    codes = F.embedding(predecessors, weights[f"{SELECTOR}predecessor_codebook"]).to(dtype)
    gate = F.linear(hidden, weights[f"{SELECTOR}hidden_projection.weight"].to(dtype))
    return (codes * gate) @ successors.to(dtype).transpose(-1, -2)


class Surprise(torch.autograd.Function):
    """Cross-entropy of `logits [..., vocabulary]` with the text's token and the likeliest ones.

    Returns HARD of the one and the rest of the other, and the one alone, each `[...]`. Its own
    gradient passes over the logits a third as often as autograd's.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, likely_rows: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = logits.float().logsumexp(-1)
        hard = total - logits.gather(-1, rows[..., None])[..., 0]
        soft = total - (shares * logits.gather(-1, likely_rows)).sum(-1)
        ctx.save_for_backward(logits, total, rows, likely_rows, shares)
        ctx.mark_non_differentiable(hard)
        return HARD * hard + (1 - HARD) * soft, hard

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, total, rows, likely_rows, shares = ctx.saved_tensors
        of = gradients[0][..., None].float()
        result = (logits - total[..., None]).exp_().mul_(of)
        result.scatter_add_(-1, rows[..., None], -HARD * of)
        result.scatter_add_(-1, likely_rows, (HARD - 1) * of * shares)
        return result.to(logits.dtype), None, None, None


def draft_loss(
    weights: Weights, llama: Llama, vocabulary: Vocabulary, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return the batch's loss, and which drafts of whole blocks are right `[blocks, DRAFTS]`."""
    features, states = read(llama, batch.ids)
    last = batch.ids.shape[1] - 1
    after = torch.arange(1, BLOCK, device=batch.ids.device)
    places = batch.anchors[:, :, None] + after  # of the drafts
    inside = (places < batch.lengths[:, None, None]).flatten(0, 1)
    places = places.clamp_max(last).flatten(1)
    labels = batch.ids.gather(1, places)
    predecessors = batch.ids.gather(1, places - 1).view(-1, DRAFTS)
    with torch.no_grad():
        likeliest = F.linear(states, vocabulary.head).float()  # of all positions
        best = likeliest.topk(TOP)
        shares = (best.values - likeliest.logsumexp(-1, keepdim=True)).exp()
        del likeliest
        index = (places - 1)[..., None].expand(-1, -1, TOP)
        wanted_rows = best.indices.gather(1, index).view(-1, DRAFTS, TOP)
        wanted = shares.gather(1, index).view(-1, DRAFTS, TOP)
        wanted = wanted / wanted.sum(-1, keepdim=True)
    rows = vocabulary.row[labels].view(-1, DRAFTS)
    known = inside & (rows >= 0)
    hidden = block_states(weights, llama, features, batch.ids, batch.anchors).flatten(0, 1)
    logits = F.linear(hidden, vocabulary.head)
    codes = weights[f"{SELECTOR}successor_codebook"][vocabulary.ids]
    both = logits + selector_scores(weights, hidden, predecessors, codes)

    aim = rows.clamp_min(0), wanted_rows, wanted
    alone, _ = Surprise.apply(logits, *aim)
    together, hard = Surprise.apply(both, *aim)
    right = torch.where(known, (-hard).exp(), 0.0)
    each = ALONE * alone + (1 - ALONE) * together
    loss = (each * position_weights(right, AWARE) * known).sum() / known.any(-1).sum().clamp_min(1)
    hit = (both.detach().argmax(-1) == rows) & known
    return loss, hit[inside.all(-1)].float()


@torch.no_grad()
def drafts(
    weights: Weights, llama: Llama, vocabulary: Vocabulary, ids: Tensor, anchors: Tensor
) -> Tensor:
    """Propose greedily after each anchor of one text, int64 `[anchors, DRAFTS]`."""
    features, _ = read(llama, ids[None])
    hidden = block_states(weights, llama, features, ids[None], anchors[None])[0]
    values, best = F.linear(hidden, vocabulary.head).float().topk(CANDIDATES)
    candidates = vocabulary.ids[best]
    before, path = ids[anchors], []
    for place in range(DRAFTS):
        codes = weights[f"{SELECTOR}successor_codebook"][candidates[:, place]]
        added = selector_scores(weights, hidden[:, place, None], before[:, None], codes)[:, 0]
        chosen = (values[:, place] + added.float()).argmax(-1)
        before = candidates[:, place].gather(1, chosen[:, None])[:, 0]
        path.append(before)
    return torch.stack(path, dim=1)


def tau(
    weights: Weights, llama: Llama, vocabulary: Vocabulary, texts: list[tuple[Tensor, int]]
) -> float:
    """Return the tokens a round that a decoder would take for greedy texts, each with its start."""
    tokens = rounds = 0
    for ids, start in texts:
        anchors = torch.arange(start, len(ids) - 1, device=ids.device)
        proposed = drafts(weights, llama, vocabulary, ids, anchors)
        padded = F.pad(ids, (0, BLOCK), value=-1)
        own = padded[anchors[:, None] + torch.arange(1, BLOCK, device=ids.device)]
        accepted = (proposed == own).long().cumprod(-1).sum(-1).tolist()
        at = 0
        while at < len(accepted):
            brought = min(accepted[at] + 1, len(accepted) - at)
            at, tokens, rounds = at + brought, tokens + brought, rounds + 1
    return tokens / max(rounds, 1)


def save_drafter(weights: Weights, llama: Llama, vocabulary: Vocabulary, folder: Path) -> None:
    """Write the layout of `speculators`, which has reduced vocabularies, in bfloat16.

    The convolutions of DFlash 2 are of one token and leave all as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach() for name, value in weights.items()}
    tensors["lm_head.weight"] = vocabulary.head
    hidden, layers = llama.embedding.shape[1], layer_count(weights)
    for number in range(layers):
        for half in ("attention", "mlp"):
            name = f"layers.{number}.{half}_conv."
            tensors[f"{name}base_kernel"] = torch.ones(2, 1, hidden)
            tensors[f"{name}kernel_projection.weight"] = torch.zeros(2, hidden)
    stored = {name: value.to("cpu", torch.bfloat16) for name, value in tensors.items()}
    ids = vocabulary.ids.cpu()
    stored["d2t"] = ids - torch.arange(len(ids))
    stored["t2d"] = vocabulary.row.cpu() >= 0
    stored = {name: value.contiguous() for name, value in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    of_target = llama.config
    layer = {name: of_target[name] for name in SHARED} | {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_target_layers": of_target["num_hidden_layers"],
        "layer_types": ["full_attention"] * layers,
        "head_dim": llama.head_dim,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
    }
    config = {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "transformer_layer_config": layer,
        "block_size": BLOCK,
        "draft_vocab_size": len(ids),
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "mask_token_id": MASK,
        "dtype": "bfloat16",
        "selector_rank": RANK,
        "selector_top_k": CANDIDATES,
        "conv_kernel_size": 1,
        "conv_group_size": hidden,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "max_position_embeddings", "rope_parameters", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id"),
)


def load_weights(folder: Path, device: torch.device) -> tuple[Weights, Tensor]:
    """Load what `save_drafter` wrote: float32 weights, and the ids that it proposes."""
    tensors = load_file(folder / "model.safetensors", device=str(device))
    ids = tensors.pop("d2t") + torch.arange(len(tensors.pop("lm_head.weight")), device=device)
    del tensors["t2d"]
    kept = {name: value.float() for name, value in tensors.items() if "_conv." not in name}
    return kept, ids
