"""Kernels in Triton's language, of which each row is computed alike, whatever rows are beside it.

A row's numbers are added up in one order. The tile may follow the number of rows; how the inner
dimension is cut follows the shape of the weight alone, and how keys are cut is the same for all.
So a token has the same bits whether it is verified alone, with drafts, or among other sequences.

Triton's interpreter (`TRITON_INTERPRET=1`) runs all of them on a CPU. `launch.py` says what each
takes and returns.
"""

import os

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1.0e30)  # largest score of no keys
# the interpreter multiplies 16 bits wrongly
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _dot(x, y, total):
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    scales,
    out,
    rows,
    columns,
    depth,
    part,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
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
    run: tl.constexpr = BLOCK if BLOCK > 0 else DEPTH
    for begin in range(0, part, run):
        # a block's products are added up on their own, in the same order by every tile
        summed = tl.zeros((ROWS, COLUMNS), tl.float32) if BLOCK > 0 else total
        for offset in tl.static_range(0, run, DEPTH):
            start = begin + offset
            inside = d[None, :] + start < depth
            a = tl.load(x_at + start, mask=(r[:, None] < rows) & inside, other=0.0)
            b = tl.load(weight_at + start, mask=(c[:, None] < columns) & inside, other=0.0)
            summed = _dot(a, tl.trans(b.to(a.dtype)), summed)
        if BLOCK > 0:
            blocks = tl.cdiv(depth, run)
            # beyond the depth the sum is 0, whatever its scale
            block = tl.minimum(index * (part // run) + begin // run, blocks - 1)
            scale = tl.load(scales + c * blocks + block, mask=c < columns, other=0.0)
            total += summed * scale[None, :]
        else:
            total = summed
    if SCALED:
        total *= tl.load(scales + c, mask=c < columns, other=0.0)[None, :]
    out_at = out + (index.to(tl.int64) * rows + r[:, None]) * columns + c[None, :]
    tl.store(out_at, total, mask=(r[:, None] < rows) & (c[None, :] < columns))


@triton.jit(do_not_specialize=["rows"])
def add_up_kernel(
    parts, bias, out, rows, size, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(
        out + row * size + at,
        _sum(parts, bias, row, rows, at, inside, size, PARTS, BIAS),
        mask=inside,
    )


@triton.jit
def _sum(parts, bias, row, rows, at, inside, size, PARTS: tl.constexpr, BIAS: tl.constexpr):
    """Add up the parts of a row in order, and a bias."""
    total = tl.load(parts + row * size + at, mask=inside, other=0.0).to(tl.float32)
    for index in tl.static_range(1, PARTS):
        total += tl.load(parts + (index * rows + row) * size + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
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


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
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


@triton.jit
def _head(
    parts,
    bias,
    weight,
    cos,
    sin,
    position,
    row,
    rows,
    begin,
    columns,
    at,
    epsilon,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return a head of a row, which begins at a column: normed, then rotated.

    position: where to read it.
    """
    inside = at < SIZE
    half: tl.constexpr = ROTATED // 2
    # what a number is turned with
    other = tl.where(at < half, at + half, tl.where(at < ROTATED, at - half, at))
    x = _sum(parts, bias, row, rows, begin + at, inside, columns, PARTS, BIAS)
    y = _sum(parts, bias, row, rows, begin + other, inside, columns, PARTS, BIAS)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x) / SIZE + epsilon)
        x = x * factor * tl.load(weight + at, mask=inside, other=0.0)
        y = y * factor * tl.load(weight + other, mask=inside, other=0.0)
    if ROTATED > 0:
        turns = at < ROTATED
        angle = tl.load(position) * half + at % half
        a = tl.load(cos + angle, mask=turns, other=1.0)
        b = tl.load(sin + angle, mask=turns, other=0.0)
        x = x * a + y * tl.where(at < half, -b, b)
    return x


@triton.jit
def _finite(x, dtype: tl.constexpr):
    """Make what caches keep finite: 0 times infinity would reach rows that mask it."""
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.38e38
    x = tl.where(x == x, x, 0.0)
    return tl.where(x > largest, largest, tl.where(x < -largest, -largest, x)).to(dtype)


@triton.jit(do_not_specialize=["rows", "width", "out_rows", "apart"])
def head_kernel(
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
    apart,  # positions from a sequence to the next
    epsilon,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BETWEEN: tl.constexpr,
    ROTATED: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    CACHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence, place = row // width, row % width
    at = tl.arange(0, BLOCK)
    begin = first + head * (SIZE + BETWEEN)
    position = positions + sequence * apart + place if ROTATED > 0 else positions
    x = _head(
        parts, bias, weight, cos, sin, position, row, rows, begin, columns, at, epsilon,
        SIZE, ROTATED, PARTS, BIAS, NORM,
    )  # fmt: skip
    if CACHED:
        place += tl.load(write_index + sequence)
        x = _finite(x, out.dtype.element_ty)
    to = ((sequence * HEADS + head) * out_rows + place) * SIZE + at
    tl.store(out + to, x.to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit(do_not_specialize=["rows", "width", "apart"])
def attention_input_kernel(
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
    width,
    columns,
    cache_rows,
    apart,  # positions from a sequence to the next
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do for queries, keys and values, side by side, what `head_kernel` does for one of them."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence, token = row // width, row % width
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    begin = head * SIZE
    position = positions + sequence * apart + token if ROTATED > 0 else positions
    if head < HEADS:
        x = _head(
            parts, bias, q_weight, cos, sin, position, row, rows, begin, columns, at, epsilon,
            SIZE, ROTATED, PARTS, BIAS, NORM,
        )  # fmt: skip
        to = ((sequence * HEADS + head) * width + token) * SIZE + at
        tl.store(q + to, x.to(q.dtype.element_ty), mask=inside)
    else:
        place = token + tl.load(write_index + sequence)
        kv_head = (head - HEADS) % KV_HEADS
        to = ((sequence * KV_HEADS + kv_head) * cache_rows + place) * SIZE + at
        if head < HEADS + KV_HEADS:
            x = _head(
                parts, bias, key_weight, cos, sin, position, row, rows, begin, columns, at,
                epsilon, SIZE, ROTATED, PARTS, BIAS, NORM,
            )  # fmt: skip
            tl.store(keys + to, _finite(x, keys.dtype.element_ty), mask=inside)
        else:
            x = _sum(parts, bias, row, rows, begin + at, inside, columns, PARTS, BIAS)
            tl.store(values + to, _finite(x, values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["width", "visible", "chunks"])
def attend_kernel(
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
def combine_kernel(
    mixed,
    largest,
    weights,
    sinks,
    gate,
    out,
    width,
    chunks,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    GATED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine a query's chunks, some at a time; those that it does not see change no bit."""
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
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        is_chunk = chunk < chunks
        part = (kv_head * chunks + chunk) * rows + r
        its_best = tl.load(largest + part, mask=is_chunk, other=NOTHING)
        its_weight = tl.load(weights + part, mask=is_chunk, other=0.0)
        its_total = tl.load(
            mixed + part[:, None] * SIZE + at[None, :],
            mask=is_chunk[:, None] & inside[None, :],
            other=0.0,
        )
        new_best = tl.maximum(best, tl.max(its_best, 0))
        factor, its_factor = tl.exp(best - new_best), tl.exp(its_best - new_best)
        weight = weight * factor + tl.sum(its_weight * its_factor, 0)
        total = total * factor + tl.sum(its_total * its_factor[:, None], 0)
        best = new_best
    # a row that sees nothing is 0
    result = total / tl.maximum(weight, 1e-30)
    if GATED:
        gate_at = ((sequence * KV_HEADS * SHARED + head) * width + r % width) * SIZE + at
        result *= tl.sigmoid(tl.load(gate + gate_at, mask=inside, other=0.0))
    to = ((sequence * width + r % width) * KV_HEADS * SHARED + head) * SIZE + at
    tl.store(out + to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["width"])
def convolve_kernel(
    x,
    weights,
    out,
    width,
    channels,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve a token's channels with those of the tokens before it, and apply SiLU."""
    token = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    first = x + (sequence * (width + TAPS - 1) + token) * channels + at
    total = tl.load(first, mask=inside, other=0.0) * tl.load(weights + at, mask=inside, other=0.0)
    for tap in tl.static_range(1, TAPS):
        value = tl.load(first + tap * channels, mask=inside, other=0.0)
        total += value * tl.load(weights + tap * channels + at, mask=inside, other=0.0)
    to = out + (sequence * width + token) * channels + at
    tl.store(to, total * tl.sigmoid(total), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def decay_kernel(x, bias, rates, out, rows, heads, stride, BLOCK: tl.constexpr):
    """Multiply rates by the softplus of numbers and their bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * heads
    row, head = place // heads, place % heads
    biases = tl.load(bias + head, mask=inside, other=0.0)
    number = tl.load(x + row * stride + head, mask=inside, other=0.0) + biases
    small = tl.exp(-tl.abs(number))
    wide = 1.0 + small
    # log(1 + small) whose last bits are not lost (Kahan's)
    added = tl.where(wide == 1.0, 1.0, wide - 1.0)
    logarithm = tl.where(wide == 1.0, small, tl.log(wide) * (small / added))
    softplus = tl.maximum(number, 0.0) + logarithm
    rate = tl.load(rates + head, mask=inside, other=0.0)
    tl.store(out + place, softplus * rate, mask=inside)


@triton.jit
def gated_norm_kernel(
    x,
    weight,
    gate,
    out,
    heads,
    size,
    stride,
    epsilon,
    BLOCK: tl.constexpr,
):
    """Norm a head of a token, and multiply it by SiLU of its gate."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < size
    place = (row * heads + head) * size + at
    number = tl.load(x + place, mask=inside, other=0.0)
    factor = tl.rsqrt(tl.sum(number * number) / size + epsilon)
    normed = number * factor * tl.load(weight + at, mask=inside, other=0.0)
    z = tl.load(gate + row * stride + head * size + at, mask=inside, other=0.0)
    tl.store(out + place, (normed * (z * tl.sigmoid(z))).to(out.dtype.element_ty), mask=inside)


# keys, values, decays and betas are parts of one matrix, wherever that begins
@triton.jit(
    do_not_specialize=["width", "q_apart", "apart"],
    do_not_specialize_on_alignment=["q", "keys", "values", "decays", "betas"],
)
def recur_kernel(
    q,
    keys,
    values,
    state,
    decays,
    betas,
    counts,
    out,
    new_state,
    width,
    q_apart,  # numbers from a sequence to the next
    q_row,  # and from a token to the next
    apart,  # likewise of keys, values, decays and betas
    row,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    TILED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    sequence, value_head = head // HEADS, head % HEADS
    key_head = value_head // SHARED
    if TILED:
        key_head = value_head % (HEADS // SHARED)
    k = tl.arange(0, BLOCK)
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = k < KEY, v < VALUE
    in_state = in_key[:, None] & in_value[None, :]
    at = (head * KEY + k[:, None]) * VALUE + v[None, :]
    memory = tl.load(state + at, mask=in_state, other=0.0)
    for token in range(0, width):
        place = sequence * apart + token * row
        q_place = sequence * q_apart + token * q_row
        key = tl.load(keys + place + key_head * KEY + k, mask=in_key, other=0.0)
        query = tl.load(q + q_place + key_head * KEY + k, mask=in_key, other=0.0)
        value = tl.load(values + place + value_head * VALUE + v, mask=in_value, other=0.0)
        decay = tl.load(decays + place + value_head)
        beta = tl.load(betas + place + value_head)
        if COUNTED:
            count = tl.load(counts + sequence * width + token)
            decay *= count
            beta *= count
        memory = memory * tl.exp(decay)
        known = tl.sum(key[:, None] * memory, 0)
        change = (value - known) * beta
        memory = memory + key[:, None] * change[None, :]
        read = tl.sum(query[:, None] * memory, 0) * scale
        to = ((sequence * width + token) * HEADS + value_head) * VALUE + v
        tl.store(out + to, read, mask=in_value)
    tl.store(new_state + at, memory, mask=in_state)


@triton.jit(do_not_specialize=["rows", "expert_rows"])
def experts_kernel(
    x,
    stack,
    shares,
    out,
    rows,
    columns,
    depth,
    expert_rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, DEPTH)
    share = tl.load(shares + expert * rows + r, mask=r < rows, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if tl.max(tl.abs(share), 0) > 0.0:  # otherwise nobody chose the expert
        x_at = x + (expert * expert_rows + r[:, None]) * depth + d[None, :]
        stack_at = stack + (expert * depth + d[:, None]) * columns + c[None, :]
        for start in range(0, depth, DEPTH):
            in_depth = d + start < depth
            a = tl.load(x_at + start, mask=(r[:, None] < rows) & in_depth[None, :], other=0.0)
            b = tl.load(
                stack_at + start * columns,
                mask=in_depth[:, None] & (c[None, :] < columns),
                other=0.0,
            )
            total = _dot(a, b, total)
    out_at = out + (expert * rows + r[:, None]) * columns + c[None, :]
    tl.store(out_at, total, mask=(r[:, None] < rows) & (c[None, :] < columns))


@triton.jit(do_not_specialize=["rows"])
def add_experts_kernel(x, shares, out, rows, size, count, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for expert in range(0, count):
        share = tl.load(shares + expert * rows + row)
        if share != 0.0:
            part = tl.load(x + (expert * rows + row) * size + at, mask=at < size, other=0.0)
            total += part * share
    tl.store(out + row * size + at, total, mask=at < size)
