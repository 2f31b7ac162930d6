"""What the target itself writes: batched decoding that keeps tap features and logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


@dataclass
class Rollout:
    """Rows of prompt and continuation, with what the target computed at each fed position."""

    ids: Tensor  # [rows, length]
    features: Tensor  # [rows, length - 1, taps * hidden], half precision
    logits: Tensor  # [rows, length - 1, vocab], half precision; row i predicts token i + 1


class KeyValues:
    """Keys and values `[layers, rows, kv_heads, length, head_dim]`, written in place."""

    def __init__(self, model: Qwen3ForCausalLM, rows: int, length: int) -> None:
        config = model.config
        shape = (
            config.num_hidden_layers, rows, config.num_key_value_heads, length, config.head_dim
        )  # fmt: skip
        self.keys = torch.zeros(shape, device=model.device)
        self.values = torch.zeros(shape, device=model.device)

    def fill(self, cache: DynamicCache) -> None:
        for index, layer in enumerate(cache.layers):
            length = layer.keys.shape[2]
            self.keys[index, :, :, :length] = layer.keys
            self.values[index, :, :, :length] = layer.values


def decode_step(
    model: Qwen3ForCausalLM, cache: KeyValues, ids: Tensor, position: int, taps: list[int]
) -> tuple[Tensor, Tensor]:
    """Return logits `[rows, 1, vocab]` and features `[rows, 1, ...]` of `ids [rows, 1]`.

    The same arithmetic as the model's own forward, without copying the cache at every step.
    """
    body = model.model
    hidden = body.embed_tokens(ids)
    rope = body.rotary_emb(hidden, torch.tensor([[position]], device=ids.device))
    tapped = {}
    for index, layer in enumerate(body.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        heads = (*normed.shape[:2], -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(normed).view(heads)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(normed).view(heads)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rope)
        keys = cache.keys[index, :, :, : position + 1]
        values = cache.values[index, :, :, : position + 1]
        keys[:, :, -1:] = key
        values[:, :, -1:] = attention.v_proj(normed).view(heads).transpose(1, 2)
        # The query heads of one kv head stand in for query positions: no key is repeated.
        grouped = query.view(len(ids), keys.shape[1], -1, attention.head_dim)
        mixed = F.scaled_dot_product_attention(grouped, keys, values)
        hidden = hidden + attention.o_proj(mixed.reshape(len(ids), 1, -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        tapped[index] = hidden
    logits = model.lm_head(body.norm(hidden))
    return logits, torch.cat([tapped[tap] for tap in taps], dim=-1)


def pick(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Return next tokens `[rows, 1]`: greedy where the temperature is 0, sampled elsewhere."""
    logits = logits.cpu().float()
    # The largest of logits / T + Gumbel noise is a sample of softmax(logits / T).
    noise = -torch.rand(logits.shape, generator=generator).clamp_min(1e-20).log()
    gumbel = -noise.clamp_min(1e-20).log()
    return (logits + temperatures[:, None] * gumbel).argmax(-1, keepdim=True)


@torch.inference_mode()
def roll_out(
    model: Qwen3ForCausalLM,
    prompts: Tensor,
    new_tokens: int,
    temperatures: Tensor,
    taps: list[int],
    generator: torch.Generator,
) -> Rollout:
    """Continue `prompts [rows, length]` by `new_tokens` each."""
    rows, start = prompts.shape
    length = start + new_tokens
    output = model(prompts.to(model.device), use_cache=True, output_hidden_states=True)
    cache = KeyValues(model, rows, length)
    cache.fill(output.past_key_values)
    width = len(taps) * model.config.hidden_size
    features = torch.empty(rows, length - 1, width, dtype=torch.half)
    logits = torch.empty(rows, length - 1, model.config.vocab_size, dtype=torch.half)
    # hidden_states[0] is the embedding, so the stream after layer i is entry i + 1.
    features[:, :start] = torch.cat([output.hidden_states[tap + 1] for tap in taps], dim=-1)
    logits[:, :start] = output.logits
    ids = torch.cat([prompts, torch.empty(rows, new_tokens, dtype=torch.long)], dim=1)
    ids[:, start : start + 1] = pick(output.logits[:, -1], temperatures, generator)
    for position in range(start, length - 1):
        fed = ids[:, position : position + 1].to(model.device)
        step_logits, step_features = decode_step(model, cache, fed, position, taps)
        logits[:, position : position + 1] = step_logits
        features[:, position : position + 1] = step_features
        ids[:, position + 1 : position + 2] = pick(step_logits[:, 0], temperatures, generator)
    return Rollout(ids, features, logits)
