"""What the target itself writes: batched decoding that keeps what a drafter learns.

A row is a conversation of one turn. Rows that ended leave the batch, so the last ones are cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOP = 16  # likeliest next tokens kept at each position
COMPACT = 8  # steps between two looks for rows that ended


@dataclass
class Row:
    """One text, with what the target computed at each position but the last."""

    ids: Tensor  # int64 [length]
    start: int  # tokens given; the others the target wrote
    ended: bool  # it ended by itself
    features: Tensor | None  # bfloat16 [length - 1, taps * hidden]
    top_ids: Tensor | None  # int32 [length - 1, TOP]; row i predicts token i + 1, if >= start
    top_probs: Tensor | None  # bfloat16 [length - 1, TOP]


class Batch:
    """Rows of one step, left-padded: column c of a row is its position c - pad."""

    def __init__(self, model: LlamaForCausalLM, prompts: list[list[int]], room: int) -> None:
        config = model.config
        longest = max(map(len, prompts))
        self.length = longest
        self.pad = torch.tensor([longest - len(prompt) for prompt in prompts])
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        self.ids = torch.zeros(len(prompts), longest + room, dtype=torch.long)
        self.ids[:, :longest] = torch.tensor(rows)
        shape = (len(prompts), config.num_key_value_heads, longest + room, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=model.dtype) for _ in model.model.layers]
        self.values = [torch.zeros(shape, dtype=model.dtype) for _ in model.model.layers]
        self.number = torch.arange(len(prompts))

    def keep(self, rows: Tensor) -> None:
        self.pad, self.ids, self.number = self.pad[rows], self.ids[rows], self.number[rows]
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]


def forward(
    model: LlamaForCausalLM, batch: Batch, begin: int, taps: list[int]
) -> tuple[Tensor, Tensor]:
    """Columns `begin` to `length` -> last hidden states and tap features, `[rows, width, ...]`."""
    body, config = model.model, model.config
    end = batch.length
    hidden = body.embed_tokens(batch.ids[:, begin:end])
    columns = torch.arange(begin, end)
    cos, sin = body.rotary_emb(hidden, (columns - batch.pad[:, None]).clamp_min(0))
    seen = torch.arange(end)
    mask = (seen <= columns[:, None]) & (seen >= batch.pad[:, None, None])
    mask = mask[:, None]  # [rows, 1, width, end]
    rows, width = hidden.shape[:2]
    tapped = {}
    groups = config.num_attention_heads // config.num_key_value_heads
    for index, layer in enumerate(body.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        heads = (rows, width, -1, config.head_dim)
        query = attention.q_proj(normed).view(heads).transpose(1, 2)
        key = attention.k_proj(normed).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        keys, values = batch.keys[index][:, :, :end], batch.values[index][:, :, :end]
        keys[:, :, begin:] = key
        values[:, :, begin:] = attention.v_proj(normed).view(heads).transpose(1, 2)
        # query heads of one kv head stand in for query positions: no key is repeated
        grouped = query.reshape(rows, config.num_key_value_heads, groups * width, -1)
        mixed = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask.repeat(1, 1, groups, 1)
        )
        mixed = mixed.view(rows, -1, width, config.head_dim).transpose(1, 2)
        hidden = hidden + attention.o_proj(mixed.reshape(rows, width, -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        tapped[index] = hidden
    features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else hidden[..., :0]
    return body.norm(hidden), features


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The TOP likeliest tokens of logits `[..., vocabulary]`, and their probabilities."""
    best = logits.topk(TOP)
    probs = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
    return best.indices.int(), probs.bfloat16()


def pick(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Next tokens `[rows]`: the likeliest at temperature 0, else a sample (Gumbel-max)."""
    chosen, warm = logits.argmax(-1), temperatures.nonzero()[:, 0]
    noise = torch.rand(len(warm), logits.shape[1], generator=generator).clamp_min_(1e-20)
    noise = noise.log_().neg_().clamp_min_(1e-20).log_()
    chosen[warm] = (logits[warm] - temperatures[warm, None] * noise).argmax(-1)
    return chosen


@torch.inference_mode()
def roll_out(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    new_tokens: int,
    temperatures: Tensor,
    end: int,
    taps: list[int],
    generator: torch.Generator,
) -> list[Row]:
    """Continue every prompt until `end` or by `new_tokens`; without taps only ids are kept."""
    batch = Batch(model, prompts, new_tokens)
    count, columns = batch.ids.shape
    width = len(taps) * model.config.hidden_size
    kept = columns if taps else 0
    features = torch.empty(count, kept, width, dtype=torch.bfloat16)
    top_ids = torch.zeros(count, kept, TOP, dtype=torch.int32)
    top_probs = torch.zeros(count, kept, TOP, dtype=torch.bfloat16)
    lengths, starts = torch.zeros(count, dtype=torch.long), batch.pad.clone()
    ended = torch.zeros(count, dtype=torch.bool)
    ids = batch.ids.clone()
    begin = 0
    while True:
        hidden, tapped = forward(model, batch, begin, taps)
        logits = model.lm_head(hidden[:, -1]).float()
        if taps:
            features[batch.number, begin : batch.length] = tapped.bfloat16()
            # of the prompt's tokens nobody learns
            likely_ids, likely_probs = likeliest(logits)
            top_ids[batch.number, batch.length - 1] = likely_ids
            top_probs[batch.number, batch.length - 1] = likely_probs
        begin = batch.length
        chosen = pick(logits, temperatures[batch.number], generator)
        batch.ids[:, begin] = chosen
        batch.length += 1
        ids[batch.number, begin] = chosen
        live = ~ended[batch.number]
        lengths[batch.number[live]] = batch.length
        ended[batch.number[live & (chosen == end)]] = True
        if batch.length == columns or bool(ended[batch.number].all()):
            break
        if batch.length % COMPACT == 0:
            live = (~ended[batch.number]).nonzero()[:, 0]
            if len(live) <= 0.9 * len(batch.number):
                batch.keep(live)
    rows = []
    for number, prompt in enumerate(prompts):
        first, last = int(starts[number]), int(lengths[number])
        cut = slice(first, last - 1)
        rows.append(
            Row(
                ids[number, first:last].clone(),
                len(prompt),
                bool(ended[number]),
                features[number, cut].clone() if taps else None,
                top_ids[number, cut].clone() if taps else None,
                top_probs[number, cut].clone() if taps else None,
            )
        )
    return rows


@torch.inference_mode()
def replay(
    model: LlamaForCausalLM, texts: list[list[int]], starts: list[int], taps: list[int]
) -> list[Row]:
    """The rows of texts that the target wrote before, `starts` of their tokens given to it."""
    batch = Batch(model, texts, 0)
    hidden, tapped = forward(model, batch, 0, taps)
    rows = []
    for number, (ids, start) in enumerate(zip(texts, starts, strict=True)):
        own = slice(int(batch.pad[number]), -1)
        fed = len(ids) - 1
        top_ids = torch.zeros(fed, TOP, dtype=torch.int32)
        top_probs = torch.zeros(fed, TOP, dtype=torch.bfloat16)
        top_ids[start - 1 :], top_probs[start - 1 :] = likeliest(
            model.lm_head(hidden[number, own][start - 1 :]).float()
        )
        features = tapped[number, own].bfloat16()
        rows.append(Row(torch.tensor(ids), start, True, features, top_ids, top_probs))
    return rows
