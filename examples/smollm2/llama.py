"""The target in plain PyTorch: whole texts at once, or a token of each of many rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None

TAPS = [1, 8, 15, 22, 28]  # layers whose outputs the drafter sees, counted from 0


@dataclass
class Layer:
    """Weights of a decoder layer; `qkv` and `gate_up` are stacked, so that each is one product."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class Llama:
    """A Llama whose head is its embedding, as SmolLM2's."""

    config: dict[str, object]
    embedding: Tensor  # [vocabulary, hidden]
    layers: list[Layer]
    norm: Tensor
    rotations: tuple[Tensor, Tensor]  # cosines and sines, float32 [positions, head_dim]
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float


def dequantized(stored: Tensor) -> Tensor:
    """Return GGUF's tensor in float32, from Q4_1 blocks of 20 bytes, Q8_0 blocks of 34, or itself.

    Source: ggml's block_q4_1 (scale, minimum, 16 bytes of two) and block_q8_0 (scale, 32 bytes).
    """
    if stored.dtype != torch.uint8:
        return stored.float()
    rows, size = stored.shape
    width = 20 if size % 20 == 0 and size % 34 else 34
    parts = stored.view(rows, -1, width)
    scale = parts[..., :2].contiguous().view(torch.float16).float()
    if width == 34:
        return (parts[..., 2:].contiguous().view(torch.int8).float() * scale).flatten(1)
    minimum = parts[..., 2:4].contiguous().view(torch.float16).float()
    nibbles = torch.cat([parts[..., 4:] & 15, parts[..., 4:] >> 4], dim=-1)
    return (nibbles.float() * scale + minimum).flatten(1)


def load_llama(folder: Path, device: torch.device, dtype: torch.dtype, positions: int) -> Llama:
    """Load the target that `target.py` wrote into `folder`, from its blocks."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = load_file(folder / "blocks.safetensors", device=str(device))
    weights = {name: dequantized(tensor).to(dtype) for name, tensor in stored.items()}
    layers = []
    for number in range(config["num_hidden_layers"]):
        of = {name: weights[f"blk.{number}.{name}.weight"] for name in BLOCK}
        layers.append(
            Layer(
                of["attn_norm"],
                torch.cat([of["attn_q"], of["attn_k"], of["attn_v"]]),
                of["attn_output"],
                of["ffn_norm"],
                torch.cat([of["ffn_gate"], of["ffn_up"]]),
                of["ffn_down"],
            )
        )
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config["rope_parameters"]["rope_theta"]
    return Llama(
        config,
        weights["token_embd.weight"],
        layers,
        weights["output_norm.weight"],
        rotations(positions, head_dim, theta, device),
        heads,
        config["num_key_value_heads"],
        head_dim,
        config["rms_norm_eps"],
    )


BLOCK = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


def rotations(
    positions: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.arange(positions, device=device).float()[:, None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to `[..., head_dim]`; cosines and sines broadcast to it."""
    first, second = states.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (states.float() * cosines + turned * sines).to(states.dtype)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(states, (states.shape[-1],), weight.to(states.dtype), epsilon)


@torch.no_grad()
def read(llama: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return taps `[rows, length, taps * hidden]` and last hidden states of right-padded texts."""
    rows, length = ids.shape
    cosines, sines = (table[:length] for table in llama.rotations)
    hidden = F.embedding(ids, llama.embedding)
    tapped = {}
    for number, layer in enumerate(llama.layers):
        states = F.linear(rms_norm(hidden, layer.attention_norm, llama.epsilon), layer.qkv)
        states = states.view(rows, length, -1, llama.head_dim).transpose(1, 2)
        query, key, value = states.split([llama.heads, llama.kv_heads, llama.kv_heads], dim=1)
        mixed = F.scaled_dot_product_attention(
            rotated(query, cosines, sines),
            rotated(key, cosines, sines).repeat_interleave(llama.heads // llama.kv_heads, 1),
            value.repeat_interleave(llama.heads // llama.kv_heads, 1),
            is_causal=True,
        )
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), layer.output)
        hidden = hidden + mlp(llama, layer, hidden)
        tapped[number] = hidden
    taps = torch.cat([tapped[tap] for tap in TAPS], dim=-1)
    return taps, rms_norm(hidden, llama.norm, llama.epsilon)


def mlp(llama: Llama, layer: Layer, hidden: Tensor) -> Tensor:
    states = F.linear(rms_norm(hidden, layer.mlp_norm, llama.epsilon), layer.gate_up)
    gate, up = states.chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down)


class Cache:
    """Keys and values, `[rows, kv_heads, length, head_dim]` for each layer."""

    def __init__(self, llama: Llama, rows: int, length: int) -> None:
        shape = (rows, llama.kv_heads, length, llama.head_dim)
        like = llama.embedding
        self.length = length
        self.keys = [like.new_zeros(shape) for _ in llama.layers]
        self.values = [like.new_zeros(shape) for _ in llama.layers]
        self.row_heads = torch.arange(rows * llama.kv_heads, device=like.device) * length


@torch.no_grad()
def step(llama: Llama, cache: Cache, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return last hidden states `[rows, hidden]` of one token per row; writes the cache."""
    rows = len(tokens)
    cosines, sines = (table[positions][:, None] for table in llama.rotations)
    at = cache.row_heads + positions.repeat_interleave(llama.kv_heads)
    hidden = F.embedding(tokens, llama.embedding)
    for layer, keys, values in zip(llama.layers, cache.keys, cache.values, strict=True):
        states = F.linear(rms_norm(hidden, layer.attention_norm, llama.epsilon), layer.qkv)
        states = states.view(rows, -1, llama.head_dim)
        turned = rotated(states[:, : llama.heads + llama.kv_heads], cosines, sines)
        query, key = turned.split([llama.heads, llama.kv_heads], dim=1)
        value = states[:, llama.heads + llama.kv_heads :]
        keys.view(-1, llama.head_dim).index_copy_(0, at, key.reshape(-1, llama.head_dim))
        values.view(-1, llama.head_dim).index_copy_(0, at, value.reshape(-1, llama.head_dim))
        mixed = attend(
            query.reshape(rows, llama.kv_heads, -1, llama.head_dim), keys, values, positions
        )
        hidden = hidden + F.linear(mixed.flatten(1), layer.output)
        hidden = hidden + mlp(llama, layer, hidden)
    return rms_norm(hidden, llama.norm, llama.epsilon)


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attend with `query [rows, kv_heads, group, head_dim]` to the columns up to its position."""
    if query.is_cuda:
        return attend_on_gpu(query.contiguous(), keys, values, positions)
    seen = torch.arange(keys.shape[2], device=query.device) <= positions[:, None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None, None])


if triton is not None:

    @triton.jit
    def _attend(  # type: ignore[no-untyped-def]
        query,
        keys,
        values,
        positions,
        mixed,
        length,
        scale,
        GROUP: tl.constexpr,
        DIM: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """Compute one key-value head of one row, COLUMNS at a time up to its position."""
        row, head = tl.program_id(0), tl.program_id(1)
        pair = row * tl.num_programs(1) + head
        last = tl.load(positions + row)
        dim = tl.arange(0, DIM)
        member = tl.arange(0, 16)  # the least of a tensor core's product; those from GROUP on are 0
        own = (pair * GROUP + member[:, None]) * DIM + dim[None, :]
        asked = tl.load(query + own, mask=member[:, None] < GROUP, other=0.0)
        most = tl.full([16], float("-inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        sums = tl.zeros([16, DIM], tl.float32)
        base = pair.to(tl.int64) * length * DIM
        for start in range(0, last + 1, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            at = base + column[:, None] * DIM + dim[None, :]
            there = column <= last
            key = tl.load(keys + at, mask=there[:, None], other=0.0)
            value = tl.load(values + at, mask=there[:, None], other=0.0)
            score = tl.dot(asked, tl.trans(key)) * scale
            score = tl.where(there[None, :], score, float("-inf"))
            higher = tl.maximum(most, tl.max(score, 1))
            share = tl.exp(score - higher[:, None])
            kept = tl.exp(most - higher)
            total = total * kept + tl.sum(share, 1)
            sums = tl.dot(share.to(value.dtype), value, sums * kept[:, None])
            most = higher
        result = (sums / total[:, None]).to(mixed.dtype.element_ty)
        tl.store(mixed + own, result, mask=member[:, None] < GROUP)


def attend_on_gpu(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    rows, heads, group, dim = query.shape
    mixed = torch.empty_like(query)
    scale = dim**-0.5
    length = keys.shape[2]
    _attend[(rows, heads)](query, keys, values, positions, mixed, length, scale, group, dim, 64)
    return mixed
