"""Launches of the kernels: what they take and return, and how work is cut.

Products come in parts `[parts, rows, columns]`, which the next kernel adds up in order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import triton
from torch import Tensor

from dflash_trt.engines.pytorch.kernels import (
    add_experts_kernel,
    add_up_kernel,
    attend_kernel,
    attention_input_kernel,
    combine_kernel,
    convolve_kernel,
    decay_kernel,
    experts_kernel,
    gated_kernel,
    gated_norm_kernel,
    head_kernel,
    linear_kernel,
    norm_kernel,
    recur_kernel,
)

CHUNK = 256  # keys that are attended to on their own, before chunks are combined
COMBINED = 16  # chunks that are read at once
LEAST_DEPTH = 1024  # of a product in two parts
STEP = 256  # a multiple of every tile's depth, so that parts do not follow the tile
MOST_PARTED = 8192  # columns of a product that alone does not fill a GPU
LARGE_TILES = 192 << 10  # bytes of shared memory
SEPARATE = {"enable_fp_fusion": False}  # otherwise the compiler chooses which sums are rounded once


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    depth: int  # numbers of the inner dimension at a time
    warps: int
    stages: int


def tile_of(rows: int, columns: int, depth: int, itemsize: int, memory: int) -> Tile:
    """Return the tile of a product with a weight `[columns, depth]`.

    itemsize: bytes of a number; memory: of a multiprocessor, as of `shared_memory`. For 4,096 and
    more columns, up to 32 rows, 128 and 512 in bf16, these were fastest for the layers of Qwen3-8B
    on an H200 (2026-11-27, a prototype of these kernels); the others were not tried.
    """
    if itemsize > 2:
        return Tile(16 if rows <= 16 else 64, 64, 32, 4, 3)
    if columns < 4096:  # smaller tiles, so that there are enough of them
        return Tile(16 if rows <= 16 else 32, 32, 128, 4, 4)
    if rows <= 32:
        return Tile(16 if rows <= 16 else 32, 64, 128, 4, 4)
    if rows <= 64:
        return Tile(64, 128, 64, 4, 4)
    if rows <= 128 and columns <= MOST_PARTED:
        return Tile(64, 128, 64, 4, 4) if depth > columns else Tile(128, 64, 64, 4, 4)
    if memory < LARGE_TILES:
        return Tile(128, 128, 64, 8, 4)
    if columns <= MOST_PARTED:
        return Tile(128, 128, 128, 8, 3)
    return Tile(128, 256, 64, 8, 4)


def parts_of(columns: int, depth: int) -> int:
    """Return into how many parts the inner dimension of a weight `[columns, depth]` is cut."""
    return 2 if columns <= MOST_PARTED and depth >= LEAST_DEPTH else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a kernel may have."""
    if device.type != "cuda":
        return 1 << 20
    properties = torch.cuda.get_device_properties(device)
    limit: int = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return limit


def linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, *, dtype: torch.dtype, block: int = 0
) -> Tensor:
    """Multiply `[rows, depth]` by a weight `[columns, depth]`: float32 `[parts, rows, columns]`.

    dtype: of the products. A weight in e4m3 has float32 scales `[columns]`, or `[columns, blocks]`:
    one for each `block` of the depth, which must divide 256 and be a multiple of 128.
    """
    (rows, depth), columns = x.shape, len(weight)
    x = x.to(dtype).contiguous()
    tile = tile_of(rows, columns, depth, x.itemsize, shared_memory(x.device))
    parts = parts_of(columns, depth)
    part = triton.cdiv(triton.cdiv(depth, parts), STEP) * STEP
    out = torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows), parts)
    linear_kernel[grid](
        x,
        weight,
        scales,
        out,
        rows,
        columns,
        depth,
        part,
        SCALED=scales is not None and not block,
        BLOCK=block,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **SEPARATE,
    )
    return out


def add_up(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Add up a product's parts, and a bias: `[rows, columns]`."""
    count, rows, size = parts.shape
    if count == 1 and bias is None:
        return parts[0]
    out = torch.empty((rows, size), dtype=torch.float32, device=parts.device)
    block = 1024
    grid = (rows, triton.cdiv(size, block))
    has_bias = bias is not None
    add_up_kernel[grid](
        parts, bias, out, rows, size, PARTS=count, BIAS=has_bias, BLOCK=block, **SEPARATE
    )
    return out


def norm(
    x: Tensor, weight: Tensor, *, epsilon: float, dtype: torch.dtype, axis: int = -1
) -> Tensor:
    """Norm the last axis (RMSNorm)."""
    assert axis == -1
    rows = x.contiguous().reshape(1, -1, x.shape[-1])
    out = _launch_norm(rows, None, None, None, weight, epsilon, dtype)
    return out.reshape(x.shape)


def add_norm(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    *,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Add a product to the residual stream `[rows, size]`; return the sum, and its norm."""
    total = torch.empty_like(residual)
    out = _launch_norm(parts, bias, residual, total, weight, epsilon, dtype)
    return total, out


def _launch_norm(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    count, rows, size = parts.shape
    out = torch.empty((rows, size), dtype=dtype, device=parts.device)
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        parts,
        bias,
        residual,
        weight,
        total,
        out,
        rows,
        size,
        epsilon,
        PARTS=count,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=warps_of(block),
        **SEPARATE,
    )
    return out


def warps_of(numbers: int) -> int:
    """Return how many warps norm a row, as Liger-Kernel's `calculate_settings` of long rows."""
    if numbers <= 512:
        return 1
    if numbers < 2048:
        return 4
    return 8 if numbers < 8192 else 16


def gated(parts: Tensor, bias: Tensor | None, *, activation: str, dtype: torch.dtype) -> Tensor:
    """Multiply up by what the activation makes of gate; both are side by side in a product."""
    count, *shape, both = parts.shape
    rows, size = math.prod(shape), both // 2
    parts = parts.contiguous()
    out = torch.empty((*shape, size), dtype=dtype, device=parts.device)
    block = 512
    gated_kernel[(triton.cdiv(size, block), rows)](
        parts,
        bias,
        out,
        rows,
        size,
        PARTS=count,
        BIAS=bias is not None,
        GELU=activation != "silu",
        BLOCK=block,
        **SEPARATE,
    )
    return out


def attention_input(
    parts: Tensor,
    bias: Tensor | None,
    stored: Tensor | None,
    stored_bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    v_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    stored_positions: Tensor,
    write_index: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    epsilon: float,
    gated: int,
    value_is_key: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Make queries of a product and write keys and values, in one launch where it can.

    stored: the product of keys and values, if it is another one. Returns queries `[n, heads, width,
    head_dim]`, both caches and, if gated, the gates that take turns with the queries.
    """
    rotation = (cos, sin, positions)
    query = Heads(0, heads, head_dim, positions.shape[1], rotated, epsilon)
    if stored is None and not gated and not value_is_key and v_norm is None:
        given = (q_norm, k_norm, *rotation, write_index, keys, values)
        return write_attention_input(parts, bias, *given, heads=query, dtype=dtype)
    if gated:
        query = replace(query, between=head_dim)
    q = split_heads(parts, bias, q_norm, *rotation, heads=query, dtype=dtype)
    first = 0
    if stored is None:
        stored, stored_bias = parts, bias
        first = heads * (head_dim + query.between)
    key = Heads(first, kv_heads, head_dim, stored_positions.shape[1], rotated, epsilon)
    value = replace(key, first=first if value_is_key else first + kv_heads * head_dim, rotated=0)
    rotation = (cos, sin, stored_positions)
    write_heads(stored, stored_bias, k_norm, *rotation, write_index, keys, heads=key)
    write_heads(stored, stored_bias, v_norm, *rotation, write_index, values, heads=value)
    if not gated:
        return q, keys, values
    gates = replace(query, first=head_dim, rotated=0)
    gate = split_heads(parts, bias, None, None, None, None, heads=gates, dtype=torch.float32)
    return q, keys, values, gate


@dataclass(frozen=True)
class Heads:
    """Heads side by side in a product, and what becomes of them."""

    first: int  # column
    count: int
    size: int  # numbers of a head
    width: int  # tokens of a sequence
    rotated: int = 0  # numbers of a head that are rotated
    epsilon: float = 0.0  # of their norm
    between: int = 0  # columns from the end of a head to the next one


def split_heads(
    parts: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    *,
    heads: Heads,
    dtype: torch.dtype,
) -> Tensor:
    """Norm and rotate heads of a product: `[n, heads, width, size]`."""
    rows = parts.shape[1]
    shape = (rows // heads.width, heads.count, heads.width, heads.size)
    out = torch.empty(shape, dtype=dtype, device=parts.device)
    _launch_head(parts, bias, weight, cos, sin, positions, None, out, heads)
    return out


def write_heads(
    parts: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    write_index: Tensor,
    cache: Tensor,
    *,
    heads: Heads,
) -> Tensor:
    """Norm and rotate heads of a product, and write them into a cache `[n, heads, rows, size]`."""
    _launch_head(parts, bias, weight, cos, sin, positions, write_index, cache, heads)
    return cache


def write_attention_input(
    parts: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    write_index: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: Heads,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries and keys of a product, and write keys and values into caches.

    heads: of the queries, which come first, then keys, then values. Returns the queries `[n, heads,
    width, size]` in `dtype`, and both caches `[n, kv_heads, rows, size]`.
    """
    count, rows, columns = parts.shape
    n, kv_heads, cache_rows, size = keys.shape
    q = torch.empty((n, heads.count, heads.width, size), dtype=dtype, device=parts.device)
    attention_input_kernel[(rows, heads.count + 2 * kv_heads)](
        parts,
        bias,
        q_weight,
        key_weight,
        cos,
        sin,
        positions,
        write_index,
        q,
        keys,
        values,
        rows,
        heads.width,
        columns,
        cache_rows,
        _apart(positions),
        heads.epsilon,
        HEADS=heads.count,
        KV_HEADS=kv_heads,
        SIZE=size,
        ROTATED=heads.rotated,
        PARTS=count,
        BIAS=bias is not None,
        NORM=q_weight is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
        **SEPARATE,
    )
    return q, keys, values


def _launch_head(
    parts: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    write_index: Tensor | None,
    out: Tensor,
    heads: Heads,
) -> None:
    count, rows, columns = parts.shape
    block = triton.next_power_of_2(heads.size)
    head_kernel[(rows, heads.count)](
        parts,
        bias,
        weight,
        cos,
        sin,
        positions,
        write_index,
        out,
        rows,
        heads.width,
        columns,
        heads.first,
        out.shape[2],
        _apart(positions),
        heads.epsilon,
        HEADS=heads.count,
        SIZE=heads.size,
        BETWEEN=heads.between,
        ROTATED=heads.rotated,
        PARTS=count,
        BIAS=bias is not None,
        NORM=weight is not None,
        CACHED=write_index is not None,
        BLOCK=block,
        num_warps=1,
        **SEPARATE,
    )


def _apart(positions: Tensor | None) -> int:
    """Return how far apart sequences are in positions `[n, width]`, which may be part of others."""
    if positions is None:
        return 0
    return positions.stride(0)


def keys_of(head_bytes: int) -> int:
    """Return how many keys of a head are read at a time; it decides a sum's order."""
    if head_bytes <= 256:
        return 64
    return 32 if head_bytes <= 512 else 16


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    gate: Tensor | None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    cap: float | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """Attend with `[n, heads, width, head_dim]` to caches `[n, kv_heads, rows, head_dim]`.

    mask: bool `[n, 1, width, visible]`. sinks: float32 `[heads]`. gate: float32, shaped as q.
    Returns `[n * width, heads * head_dim]`.
    """
    n, width, size = len(q), q.shape[2], head_dim
    chunks = _attend_chunks(q, keys, values, mask, visible=mask.shape[-1], scale=scale, cap=cap)
    out = torch.empty((n * width, heads * size), dtype=dtype, device=q.device)
    combine_kernel[(chunks.largest.shape[-1], n * kv_heads)](
        chunks.mixed,
        chunks.largest,
        chunks.weights,
        sinks,
        gate,
        out,
        width,
        chunks.largest.shape[1],
        KV_HEADS=kv_heads,
        SHARED=heads // kv_heads,
        SIZE=size,
        SINKS=sinks is not None,
        GATED=gate is not None,
        CHUNKS=COMBINED,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
        **SEPARATE,
    )
    return out


@dataclass(frozen=True)
class Chunks:
    """What queries get of each chunk of keys, float32; rows are all heads of one kv head."""

    mixed: Tensor  # [n * kv_heads, chunks, rows, size], values times exponentials of scores
    largest: Tensor  # [n * kv_heads, chunks, rows], the score that exponentials are taken from
    weights: Tensor  # [n * kv_heads, chunks, rows], sums of exponentials


def _attend_chunks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    visible: int,
    scale: float,
    cap: float | None,
) -> Chunks:
    n, heads, width, size = q.shape
    kv_heads, cache_rows = keys.shape[1:3]
    shared, count = heads // kv_heads, triton.cdiv(visible, CHUNK)
    rows, block = shared * width, triton.next_power_of_2(size)
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    chunks = Chunks(
        mixed=empty((n * kv_heads, count, rows, size)),
        largest=empty((n * kv_heads, count, rows)),
        weights=empty((n * kv_heads, count, rows)),
    )
    head_bytes = block * keys.itemsize
    # registers have no room for more rows of long heads
    tile = 32 if rows > 16 and keys.itemsize == 2 and head_bytes <= 512 else 16
    attend_kernel[(triton.cdiv(rows, tile), n * kv_heads, count)](
        q.to(keys.dtype).contiguous(),
        keys,
        values,
        mask.contiguous().view(torch.uint8),
        chunks.mixed,
        chunks.largest,
        chunks.weights,
        width,
        visible,
        cache_rows,
        count,
        scale,
        cap or 1.0,
        KV_HEADS=kv_heads,
        SHARED=shared,
        SIZE=size,
        CAPPED=cap is not None,
        ROWS=tile,
        KEYS=keys_of(head_bytes),
        CHUNK=CHUNK,
        BLOCK=max(block, 16),
        num_warps=4,
        num_stages=2,
        **SEPARATE,
    )
    return chunks


def convolve(x: Tensor, weights: Tensor, *, taps: int) -> Tensor:
    """Convolve along the tokens, and apply SiLU.

    x: float32 `[n, taps - 1 + width, channels]`; weights: float32 `[taps, channels]`, the last of
    the token itself. Returns float32 `[n, width, channels]`.
    """
    n, channels = len(x), weights.shape[1]
    width = x.shape[1] - taps + 1
    out = torch.empty((n, width, channels), dtype=torch.float32, device=x.device)
    block = 512
    convolve_kernel[(triton.cdiv(channels, block), width, n)](
        x.contiguous(), weights, out, width, channels, TAPS=taps, BLOCK=block, **SEPARATE
    )
    return out


def decays(x: Tensor, bias: Tensor, rates: Tensor) -> Tensor:
    """Return rates times softplus(x + bias), float32 `[n, width, heads]`; rates: `[heads]`."""
    rows = x.reshape(-1, x.shape[-1])
    count, heads = rows.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block = 256
    decay_kernel[(triton.cdiv(count * heads, block),)](
        rows, bias, rates, out, count, heads, rows.stride(0), BLOCK=block, **SEPARATE
    )
    return out


def gated_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    *,
    heads: int,
    size: int,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    """Norm heads `[n, width, heads * size]`, and multiply them by SiLU of their gate.

    gate: float32 `[n * width, heads * size]`, as what it returns.
    """
    out = torch.empty(gate.shape, dtype=dtype, device=x.device)
    gated_norm_kernel[(len(gate), heads)](
        x.contiguous(),
        weight,
        gate,
        out,
        heads,
        size,
        gate.stride(0),
        epsilon,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
        **SEPARATE,
    )
    return out


def recur(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    state: Tensor,
    counts: Tensor | None,
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    tiled: int,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token, as `operators.linear_attention`.

    Key heads serve some value heads side by side, or, if tiled, take turns over them. counts: `[n,
    S, 1]`, 0 for a token that leaves the state as it is, else 1.
    """
    n, heads, key, value = state.shape
    width = q.shape[1]
    keys, values, decays, betas = _parts_of_one(keys, values, decays, betas)
    new_state = torch.empty(state.shape, device=state.device)
    out = torch.empty((n, width, heads * value), device=state.device)
    columns = 32
    recur_kernel[(triton.cdiv(value, columns), n * heads)](
        q,
        keys,
        values,
        state.contiguous(),
        decays,
        betas,
        counts,
        out,
        new_state,
        width,
        *q.stride()[:2],
        *keys.stride()[:2],
        key_dim**-0.5,
        HEADS=heads,
        SHARED=value_heads // key_heads,
        TILED=bool(tiled),
        KEY=key,
        VALUE=value,
        COUNTED=counts is not None,
        BLOCK=triton.next_power_of_2(key),
        COLUMNS=columns,
        num_warps=4,
        **SEPARATE,
    )
    return out, new_state


def _parts_of_one(*parts: Tensor) -> Sequence[Tensor]:
    """Return matrices `[n, S, columns]` that lie side by side, as they mostly do already."""
    if len({part.stride() for part in parts}) == 1:
        return parts
    return torch.split(torch.cat(parts, 2), [part.shape[2] for part in parts], 2)


def experts(x: Tensor, stack: Tensor, shares: Tensor) -> Tensor:
    """Multiply tokens by the experts that they chose.

    x: `[1 or experts, rows, depth]`; stack: `[experts, depth, columns]`; shares: float32 `[experts,
    rows, 1]`, 0 where an expert is not chosen. Returns float32 `[experts, rows, columns]`, of which
    what is not chosen may be anything finite.
    """
    count, depth, columns = stack.shape
    rows = x.shape[1]
    x, shares = x.to(stack.dtype).contiguous(), shares.contiguous()
    tile = tile_of(rows, MOST_PARTED, depth, stack.itemsize, shared_memory(x.device))
    out = torch.empty((count, rows, columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows), count)
    experts_kernel[grid](
        x,
        stack,
        shares,
        out,
        rows,
        columns,
        depth,
        rows if len(x) > 1 else 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **SEPARATE,
    )
    return out


def add_experts(x: Tensor, shares: Tensor) -> Tensor:
    """Add up what experts make of each token, in the experts' order: `[rows, size]`."""
    count, rows, size = x.shape
    out = torch.empty((rows, size), dtype=torch.float32, device=x.device)
    block = 256
    grid = (triton.cdiv(size, block), rows)
    x, shares = x.contiguous(), shares.contiguous()
    add_experts_kernel[grid](x, shares, out, rows, size, count, BLOCK=block, **SEPARATE)
    return out
