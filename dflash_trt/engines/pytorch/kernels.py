"""Kernels in Triton's language, of which each row is computed alike, whatever rows are beside it.

A row's numbers are added up in one order. The tile may follow the number of rows; how the inner
dimension is cut follows the shape of the weight alone, and how keys are cut is the same for all.
So a token has the same bits whether it is verified alone, with drafts, or among other sequences.

Products come in parts `[parts, rows, columns]` that the next kernel adds up. Triton's interpreter
(`TRITON_INTERPRET=1`) runs all kernels on a CPU.
"""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 256  # keys that are attended to on their own, before chunks are combined in order
NOTHING = tl.constexpr(-1.0e30)  # largest score of no keys
LEAST_DEPTH = 1024  # of a product in two parts
MOST_PARTED = 8192  # columns of a product that alone does not fill a GPU
# the interpreter multiplies 16 bits wrongly
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SEPARATE = {"enable_fp_fusion": False}  # otherwise the compiler chooses which sums are rounded once


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    depth: int  # numbers of the inner dimension at a time
    warps: int
    stages: int


def tile_of(rows: int, columns: int) -> Tile:
    """Return the tile of a product; measured on an H200 for the layers of Qwen3-8B."""
    if columns < 4096:  # smaller tiles, so that there are enough of them
        return Tile(16 if rows <= 16 else 32, 32, 128, 4, 4)
    if rows <= 16:
        return Tile(16, 64, 128, 4, 4)
    if rows <= 32:
        return Tile(32, 64, 128, 4, 4)
    if rows <= 64:
        return Tile(64, 128, 64, 4, 4)
    return Tile(128, 128, 64, 8, 4)


def parts_of(columns: int, depth: int) -> int:
    """Return into how many parts the inner dimension of a weight `[columns, depth]` is cut."""
    return 2 if columns <= MOST_PARTED and depth >= LEAST_DEPTH else 1


@triton.jit
def _dot(x, y, total):
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    out,
    rows,
    columns,
    depth,
    part,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.program_id(2)
    d = index * part + tl.arange(0, DEPTH)
    x_at = x + r[:, None].to(tl.int64) * depth + d[None, :]
    weight_at = weight + c[:, None].to(tl.int64) * depth + d[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, part, DEPTH):
        inside = d[None, :] + start < depth
        a = tl.load(x_at + start, mask=(r[:, None] < rows) & inside, other=0.0)
        b = tl.load(weight_at + start, mask=(c[:, None] < columns) & inside, other=0.0)
        total = _dot(a, tl.trans(b), total)
    out_at = out + (index.to(tl.int64) * rows + r[:, None]) * columns + c[None, :]
    tl.store(out_at, total, mask=(r[:, None] < rows) & (c[None, :] < columns))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `[rows, depth]` by a weight `[columns, depth]`: float32 `[parts, rows, columns]`."""
    (rows, depth), columns = x.shape, len(weight)
    x = x.to(weight.dtype).contiguous()
    tile, parts = tile_of(rows, columns), parts_of(columns, depth)
    part = triton.cdiv(triton.cdiv(depth, parts), tile.depth) * tile.depth
    out = torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows), parts)
    _linear[grid](
        x,
        weight,
        out,
        rows,
        columns,
        depth,
        part,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _add_up(parts, bias, out, rows, size, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out + row * size + at, _sum(parts, bias, row, rows, at, inside, size, PARTS, BIAS), mask=inside)


@triton.jit
def _sum(parts, bias, row, rows, at, inside, size, PARTS: tl.constexpr, BIAS: tl.constexpr):
    """Add up the parts of a row in order, and a bias."""
    total = tl.load(parts + row * size + at, mask=inside, other=0.0).to(tl.float32)
    for index in tl.static_range(1, PARTS):
        total += tl.load(parts + (index * rows + row) * size + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0)
    return total


def add_up(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Add up a product's parts, and a bias: `[rows, columns]`."""
    count, rows, size = parts.shape
    if count == 1 and bias is None:
        return parts[0]
    out = torch.empty((rows, size), dtype=torch.float32, device=parts.device)
    block = 1024
    grid = (rows, triton.cdiv(size, block))
    has_bias = bias is not None
    _add_up[grid](
        parts, bias, out, rows, size, PARTS=count, BIAS=has_bias, BLOCK=block, **SEPARATE
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm(
    parts,
    bias,
    residual,
    weight,
    total,
    out,
    rows,
    size,
    epsilon,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = _sum(parts, bias, row, rows, at, inside, size, PARTS, BIAS)
    if RESIDUAL:
        x += tl.load(residual + row * size + at, mask=inside, other=0.0)
        tl.store(total + row * size + at, x, mask=inside)
    factor = tl.rsqrt(tl.sum(x * x) / size + epsilon)
    y = x * factor * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, y.to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Norm the last axis (RMSNorm)."""
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
    _norm[(rows,)](
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
        num_warps=4 if block > 512 else 1,
        **SEPARATE,
    )
    return out


@triton.jit
def _gated(
    parts,
    bias,
    out,
    rows,
    size,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = _sum(parts, bias, row, rows, at, inside, 2 * size, PARTS, BIAS)
    up = _sum(parts, bias, row, rows, size + at, inside, 2 * size, PARTS, BIAS)
    if GELU:
        # by its approximation with a hyperbolic tangent
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inner)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * size + at, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(parts: Tensor, bias: Tensor | None, *, gelu: bool, dtype: torch.dtype) -> Tensor:
    """Multiply up by what the activation makes of gate; both are side by side in a product."""
    count, rows, both = parts.shape
    size = both // 2
    out = torch.empty((rows, size), dtype=dtype, device=parts.device)
    block = 512
    _gated[(triton.cdiv(size, block), rows)](
        parts,
        bias,
        out,
        rows,
        size,
        PARTS=count,
        BIAS=bias is not None,
        GELU=gelu,
        BLOCK=block,
        **SEPARATE,
    )
    return out


@triton.jit(do_not_specialize=["rows", "width"])
def _head(
    parts,
    bias,
    weight,
    cos,
    sin,
    positions,
    write_index,
    out,
    rows,
    width,
    columns,
    first,
    out_rows,
    epsilon,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    CACHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence, token = row // width, row % width
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    half: tl.constexpr = ROTATED // 2
    # what a number is turned with
    other = tl.where(at < half, at + half, tl.where(at < ROTATED, at - half, at))
    begin = first + head * SIZE
    x = _sum(parts, bias, row, rows, begin + at, inside, columns, PARTS, BIAS)
    y = _sum(parts, bias, row, rows, begin + other, inside, columns, PARTS, BIAS)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x) / SIZE + epsilon)
        x = x * factor * tl.load(weight + at, mask=inside, other=0.0)
        y = y * factor * tl.load(weight + other, mask=inside, other=0.0)
    if ROTATED > 0:
        turns = at < ROTATED
        angle = tl.load(positions + row) * half + at % half
        a = tl.load(cos + angle, mask=turns, other=1.0)
        b = tl.load(sin + angle, mask=turns, other=0.0)
        x = x * a + y * tl.where(at < half, -b, b)
    place = token
    if CACHED:
        place = token + tl.load(write_index + sequence)
    to = ((sequence * HEADS + head) * out_rows + place) * SIZE + at
    tl.store(out + to, x.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Heads:
    """Heads side by side in a product, and what becomes of them."""

    first: int  # column
    count: int
    size: int  # numbers of a head
    width: int  # tokens of a sequence
    rotated: int = 0  # numbers of a head that are rotated
    epsilon: float | None = None  # of their norm


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
    _launch_head(parts, bias, weight, (cos, sin, positions), None, out, heads)
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
    _launch_head(parts, bias, weight, (cos, sin, positions), write_index, cache, heads)
    return cache


def _launch_head(
    parts: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    rotation: tuple[Tensor | None, Tensor | None, Tensor | None],
    write_index: Tensor | None,
    out: Tensor,
    heads: Heads,
) -> None:
    count, rows, columns = parts.shape
    cos, sin, positions = rotation
    block = triton.next_power_of_2(heads.size)
    _head[(rows, heads.count)](
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
        heads.epsilon or 0.0,
        HEADS=heads.count,
        SIZE=heads.size,
        ROTATED=heads.rotated,
        PARTS=count,
        BIAS=bias is not None,
        NORM=weight is not None,
        CACHED=write_index is not None,
        BLOCK=block,
        num_warps=1,
        **SEPARATE,
    )


@triton.jit(do_not_specialize=["width", "visible", "chunks"])
def _attend(
    q,
    keys,
    values,
    mask,
    mixed,
    largest,
    weights,
    width,
    visible,
    cache_rows,
    chunks,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend to one chunk of keys with the queries of all heads that share them."""
    kv_head = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(2)
    sequence = kv_head // KV_HEADS
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    rows = SHARED * width
    in_row, in_size = r[:, None] < rows, at[None, :] < SIZE
    token = r % width
    query = tl.load(
        q + (kv_head * rows + r[:, None]) * SIZE + at[None, :], mask=in_row & in_size, other=0.0
    )
    best = tl.full((ROWS,), NOTHING, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, CHUNK, KEYS):
        k = chunk * CHUNK + start + tl.arange(0, KEYS)
        in_key = k[:, None] < visible
        from_cache = (kv_head * cache_rows + k[:, None]) * SIZE + at[None, :]
        key = tl.load(keys + from_cache, mask=in_key & in_size, other=0.0)
        seen = tl.load(
            mask + (sequence * width + token[:, None]) * visible + k[None, :],
            mask=in_row & (k[None, :] < visible),
            other=0,
        )
        scores = _dot(query, tl.trans(key), tl.zeros((ROWS, KEYS), tl.float32)) * scale
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 * (scores / cap)) - 1.0)  # tanh
        scores = tl.where(seen != 0, scores, NOTHING)
        new_best = tl.maximum(best, tl.max(scores, 1))
        share = tl.where(seen != 0, tl.exp(scores - new_best[:, None]), 0.0)
        factor = tl.exp(best - new_best)
        value = tl.load(values + from_cache, mask=in_key & in_size, other=0.0)
        weight = weight * factor + tl.sum(share, 1)
        total = _dot(share.to(value.dtype), value, total * factor[:, None])
        best = new_best
    to = (kv_head * chunks + chunk) * rows + r
    tl.store(mixed + to[:, None] * SIZE + at[None, :], total, mask=in_row & in_size)
    tl.store(largest + to, best, mask=r < rows)
    tl.store(weights + to, weight, mask=r < rows)


@triton.jit(do_not_specialize=["width", "chunks"])
def _combine(
    mixed,
    largest,
    weights,
    sinks,
    out,
    width,
    chunks,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine a query's chunks in order; those that it does not see change no bit."""
    r = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    rows = SHARED * width
    sequence, head = kv_head // KV_HEADS, (kv_head % KV_HEADS) * SHARED + r // width
    best = tl.full((1,), NOTHING, tl.float32)
    weight = tl.zeros((1,), tl.float32)
    if SINKS:
        best = tl.load(sinks + head + tl.zeros((1,), tl.int32))
        weight = weight + 1.0
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(0, chunks):
        part = (kv_head * chunks + chunk) * rows + r
        its_best = tl.load(largest + part + tl.zeros((1,), tl.int32))
        new_best = tl.maximum(best, its_best)
        factor, its_factor = tl.exp(best - new_best), tl.exp(its_best - new_best)
        its_weight = tl.load(weights + part + tl.zeros((1,), tl.int32))
        weight = weight * factor + its_weight * its_factor
        its_total = tl.load(mixed + part * SIZE + at, mask=inside, other=0.0)
        total = total * factor + its_total * its_factor
        best = new_best
    # a row that sees nothing is 0
    result = total / tl.maximum(weight, 1e-30)
    to = ((sequence * width + r % width) * KV_HEADS * SHARED + head) * SIZE + at
    tl.store(out + to, result.to(out.dtype.element_ty), mask=inside)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    *,
    visible: int,
    scale: float,
    cap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Attend with `[n, heads, width, size]` to caches `[n, kv_heads, rows, size]`.

    mask: bool `[n, 1, width, visible]`. sinks: float32 `[heads]`. Returns `[n * width, heads *
    size]`.
    """
    n, heads, width, size = q.shape
    kv_heads, cache_rows = keys.shape[1:3]
    shared, chunks = heads // kv_heads, triton.cdiv(visible, CHUNK)
    rows, block = shared * width, triton.next_power_of_2(size)
    q = q.to(keys.dtype).contiguous()
    mask = mask.contiguous().view(torch.uint8)
    mixed = torch.empty((n * kv_heads, chunks, rows, size), dtype=torch.float32, device=q.device)
    largest = torch.empty((n * kv_heads, chunks, rows), dtype=torch.float32, device=q.device)
    weights = torch.empty_like(largest)
    out = torch.empty((n * width, heads * size), dtype=dtype, device=q.device)
    tile = 16 if rows <= 16 else 32
    _attend[(triton.cdiv(rows, tile), n * kv_heads, chunks)](
        q,
        keys,
        values,
        mask,
        mixed,
        largest,
        weights,
        width,
        visible,
        cache_rows,
        chunks,
        scale,
        cap or 1.0,
        KV_HEADS=kv_heads,
        SHARED=shared,
        SIZE=size,
        CAPPED=cap is not None,
        ROWS=tile,
        KEYS=64 if block <= 128 else 32,
        CHUNK=CHUNK,
        BLOCK=max(block, 16),
        num_warps=4,
        **SEPARATE,
    )
    _combine[(rows, n * kv_heads)](
        mixed,
        largest,
        weights,
        sinks,
        out,
        width,
        chunks,
        KV_HEADS=kv_heads,
        SHARED=shared,
        SIZE=size,
        SINKS=sinks is not None,
        BLOCK=block,
        num_warps=1,
        **SEPARATE,
    )
    return out


@triton.jit(do_not_specialize=["width"])
def _recur(
    q,
    keys,
    values,
    state,
    decays,
    betas,
    out,
    new_state,
    width,
    scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    sequence = head // HEADS
    k = tl.arange(0, BLOCK)
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = k < KEY, v < VALUE
    in_state = in_key[:, None] & in_value[None, :]
    at = (head * KEY + k[:, None]) * VALUE + v[None, :]
    memory = tl.load(state + at, mask=in_state, other=0.0)
    for token in range(0, width):
        row = (sequence * width + token) * HEADS + head % HEADS
        key = tl.load(keys + row * KEY + k, mask=in_key, other=0.0)
        query = tl.load(q + row * KEY + k, mask=in_key, other=0.0)
        value = tl.load(values + row * VALUE + v, mask=in_value, other=0.0)
        memory = memory * tl.exp(tl.load(decays + row))
        known = tl.sum(key[:, None] * memory, 0)
        change = (value - known) * tl.load(betas + row)
        memory = memory + key[:, None] * change[None, :]
        read = tl.sum(query[:, None] * memory, 0) * scale
        tl.store(out + row * VALUE + v, read, mask=in_value)
    tl.store(new_state + at, memory, mask=in_state)


def recur(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    decays: Tensor,
    betas: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token, as `operators.linear_attention`."""
    n, heads, key, value = state.shape
    width = q.shape[1]
    out, new_state = (torch.empty(x.shape, device=x.device) for x in (values, state))
    given = [x.contiguous() for x in (q, keys, values, state, decays, betas)]
    columns = 32
    _recur[(triton.cdiv(value, columns), n * heads)](
        *given,
        out,
        new_state,
        width,
        scale,
        HEADS=heads,
        KEY=key,
        VALUE=value,
        BLOCK=triton.next_power_of_2(key),
        COLUMNS=columns,
        num_warps=4,
        **SEPARATE,
    )
    return out, new_state
