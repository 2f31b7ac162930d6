"""Each kernel equals PyTorch, and a row alone has the bits that it has among others.

In Triton's interpreter, or compiled where a GPU is.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

from dflash_trt.engines.pytorch import launch, operators
from dflash_trt.engines.pytorch.launch import Heads
from tests.support.interpreted import DEVICE, in_order

FLOAT = torch.float32
few = settings(max_examples=10, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device(DEVICE), in_order():
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator)


def close(ours: Tensor, theirs: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-5)


def assert_rows_alone(together: Tensor, alone: Callable[[int], Tensor]) -> None:
    """Assert that each row has the same bits when it is computed alone."""
    for row in range(len(together)):
        assert torch.equal(together[row : row + 1], alone(row)), f"row {row}"


def chunk(parts: Tensor, row: int) -> Tensor:
    return parts[:, row : row + 1].contiguous()


def alone(x: Tensor, row: int) -> Tensor:
    """Return a row at an address that is a multiple of 16, as those of an engine's sizes are.

    Of a row at another one a GPU's compiler may share out the numbers otherwise.
    """
    return x[row : row + 1].clone()


# --- products -------------------------------------------------------------------------------------


@few
@given(
    rows=st.sampled_from([1, 2, 5, 17, 33]),
    columns=st.integers(1, 70),
    depth=st.sampled_from([1, 31, 64, 257, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_products(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, depth), random(columns, depth, seed=1).to(dtype)
    parts = launch.linear(x, weight, None, dtype=dtype)
    assert parts.shape == (launch.parts_of(columns, depth), rows, columns)
    close(parts.sum(0), operators.matmul(x, weight.T), 1e-3)
    for row in {0, rows // 2, rows - 1}:
        one = launch.linear(alone(x, row), weight, None, dtype=dtype)
        assert torch.equal(parts[:, row], one[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_fp8(dtype: torch.dtype) -> None:
    """Rows of weights have scales, which multiply whole sums."""
    x, weight, scales = random(18, 70), random(40, 70, seed=1), random(40, seed=2).abs()
    codes = weight.to(torch.float8_e4m3fn)
    parts = launch.linear(x, codes, scales, dtype=dtype)
    widened = operators.dequantize_linear(codes, scales, axis=0)
    close(parts[0], x.to(dtype).float() @ widened.T, 1e-3)
    for row in (0, 17):
        one = launch.linear(alone(x, row), codes, scales, dtype=dtype)
        assert torch.equal(parts[:, row], one[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [128, 256])
def test_products_in_fp8_blocks(block: int, dtype: torch.dtype) -> None:
    """Blocks of inputs have scales; the last block is cut off."""
    x, weight = random(18, 1100), random(40, 1100, seed=1)
    scales = random(40, -(-1100 // block), seed=2).abs()
    codes = weight.to(torch.float8_e4m3fn)
    parts = launch.linear(x, codes, scales, dtype=dtype, block=block)
    widened = operators.dequantize_linear(codes, scales, axis=1, block_size=block)
    close(parts.sum(0), x.to(dtype).float() @ widened.T, 1e-3)
    for row in (0, 17):
        one = launch.linear(alone(x, row), codes, scales, dtype=dtype, block=block)
        assert torch.equal(parts[:, row], one[:, 0])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("depth", [300, 1100, 1536])
def test_the_tile_changes_no_bit(
    itemsize: int, block: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inner dimension is cut by the weight's shape alone, whatever tile the rows have."""
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    x, weight = random(20, depth), random(70, depth, seed=1).to(dtype)
    scales = random(70, -(-depth // block), seed=2) if block else None
    if block:
        weight = weight.to(torch.float8_e4m3fn)
    tiles = {
        launch.tile_of(rows, columns, deep, itemsize, memory)
        for rows in (1, 16, 17, 32, 33, 64, 65, 128, 512)
        for columns, deep in ((70, 70), (4096, 4096), (4096, 12288), (24576, 4096))
        for memory in (99 << 10, 227 << 10)
    }
    results = []
    for tile in tiles:
        monkeypatch.setattr(launch, "tile_of", lambda *_, tile=tile: tile)
        results.append(launch.linear(x, weight, scales, dtype=dtype, block=block))
    assert len(results) >= 2
    assert all(torch.equal(result, results[0]) for result in results)


@few
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([3, 64, 100, 1100]),
    parts=st.integers(1, 3),
    biased=st.booleans(),
)
def test_sums_and_norms(rows: int, size: int, parts: int, biased: bool) -> None:
    product, residual = random(parts, rows, size), random(rows, size, seed=1)
    weight, bias = random(size, seed=2), random(size, seed=3) if biased else None
    summed = launch.add_up(product, bias)
    close(summed, product.sum(0) + (0 if bias is None else bias))
    assert_rows_alone(summed, lambda row: launch.add_up(chunk(product, row), bias))

    def add_norm(product: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return launch.add_norm(product, bias, residual, weight, epsilon=1e-5, dtype=FLOAT)

    total, normed = add_norm(product, residual)
    close(total, residual + summed)
    close(normed, operators.rms_norm(total, weight, axis=-1, epsilon=1e-5))
    for row in range(rows):
        one = add_norm(chunk(product, row), alone(residual, row))
        assert torch.equal(one[0], total[row : row + 1])
        assert torch.equal(one[1], normed[row : row + 1])
    assert torch.equal(launch.norm(total, weight, epsilon=1e-5, dtype=FLOAT), normed)


@few
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([3, 96, 520]),
    parts=st.integers(1, 2),
    gelu=st.booleans(),
    biased=st.booleans(),
)
def test_gates(rows: int, size: int, parts: int, gelu: bool, biased: bool) -> None:
    product = random(parts, rows, 2 * size)
    bias = random(2 * size, seed=1) if biased else None
    name = "gelu" if gelu else "silu"
    ours = launch.gated(product, bias, activation=name, dtype=FLOAT)
    gate, up = launch.add_up(product, bias).chunk(2, -1)
    activation = operators.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    close(ours, activation * up)
    assert_rows_alone(
        ours, lambda row: launch.gated(chunk(product, row), bias, activation=name, dtype=FLOAT)
    )


# --- heads ----------------------------------------------------------------------------------------


@few
@given(
    n=st.integers(1, 3),
    width=st.integers(1, 4),
    size=st.sampled_from([8, 24, 32]),
    share=st.sampled_from([0, 2, 4]),  # of a head that is rotated, in quarters
    normed=st.booleans(),
    first=st.sampled_from([0, 5]),
    between=st.sampled_from([0, 8]),
    biased=st.booleans(),
)
def test_heads(
    n: int, width: int, size: int, share: int, normed: bool, first: int, between: int, biased: bool
) -> None:
    """Positions are part of a wider matrix, as a drafter's are."""
    count, length = 3, 40
    rotated, epsilon = size * share // 4, 1e-6 if normed else None
    heads = Heads(first, count, size, width, rotated, epsilon, between)
    product = random(2, n * width, first + count * (size + between) + 4)
    bias = random(product.shape[-1], seed=1) if biased else None
    weight = random(size, seed=2) if normed else None
    cos, sin = (random(length, max(rotated // 2, 1), seed=seed) for seed in (3, 4))
    generator = torch.Generator(DEVICE).manual_seed(n)
    positions = torch.randint(0, length, (n, 2 + width), generator=generator)[:, 2:]
    ours = launch.split_heads(product, bias, weight, cos, sin, positions, heads=heads, dtype=FLOAT)
    x = launch.add_up(product, bias)[:, first : first + count * (size + between)]
    x = x.reshape(n, width, count, size + between)[..., :size].transpose(1, 2)
    if weight is not None:
        x = operators.rms_norm(x, weight, axis=-1, epsilon=1e-6)
    if rotated:
        x = operators.rotary_embedding(x, cos, sin, positions, rotary_embedding_dim=rotated)
    close(ours, x)
    at = torch.arange(n) * 3 + 1
    cache, expected = (torch.zeros(n, count, 20, size) for _ in range(2))
    launch.write_heads(product, bias, weight, cos, sin, positions, at, cache, heads=heads)
    operators.tensor_scatter(expected, ours, at, axis=-2, mode="linear")
    assert torch.equal(cache, expected)


@few
@given(
    n=st.integers(1, 3),
    width=st.integers(1, 4),
    size=st.sampled_from([8, 24]),
    share=st.sampled_from([0, 2, 4]),  # of a head that is rotated, in quarters
    normed=st.booleans(),
    biased=st.booleans(),
)
def test_queries_keys_and_values_together(
    n: int, width: int, size: int, share: int, normed: bool, biased: bool
) -> None:
    """One launch has the bits of three."""
    count, kv_heads, length = 4, 2, 40
    epsilon = 1e-6 if normed else None
    heads = Heads(0, count, size, width, size * share // 4, epsilon)
    columns = (count + 2 * kv_heads) * size
    product = random(2, n * width, columns)
    bias = random(columns, seed=1) if biased else None
    weights = [random(size, seed=seed) if normed else None for seed in (2, 3)]
    rotation = [random(length, max(heads.rotated // 2, 1), seed=seed) for seed in (4, 5)]
    positions, at = torch.arange(n * width).reshape(n, width), torch.arange(n) * 3 + 1
    caches = [torch.zeros(n, kv_heads, 20, size) for _ in range(4)]
    given = (*rotation, positions)
    ours = launch.write_attention_input(
        product, bias, *weights, *given, at, *caches[:2], heads=heads, dtype=FLOAT
    )
    q = launch.split_heads(product, bias, weights[0], *given, heads=heads, dtype=FLOAT)
    key = replace(heads, first=count * size, count=kv_heads)
    launch.write_heads(product, bias, weights[1], *given, at, caches[2], heads=key)
    value = Heads((count + kv_heads) * size, kv_heads, size, width)
    launch.write_heads(product, bias, None, None, None, None, at, caches[3], heads=value)
    assert all(map(torch.equal, ours, (q, *caches[2:])))


# --- attention ------------------------------------------------------------------------------------


@few
@given(
    n=st.integers(1, 2),
    width=st.integers(1, 5),
    shared=st.sampled_from([1, 3, 5]),
    size=st.sampled_from([16, 24, 64]),
    visible=st.sampled_from([1, 40, 256, 300, 600]),
    window=st.sampled_from([None, 7, 290]),
    cap=st.sampled_from([None, 3.0]),
    sunk=st.booleans(),
    gated=st.booleans(),
    combined=st.sampled_from([2, 16]),  # chunks at a time
)
def test_attention(
    n: int,
    width: int,
    shared: int,
    size: int,
    visible: int,
    window: int | None,
    cap: float | None,
    sunk: bool,
    gated: bool,
    combined: int,
) -> None:
    kv_heads, cache_rows, scale = 2, 640, size**-0.5
    heads = kv_heads * shared
    q = random(n, heads, width, size)
    keys, values = (random(n, kv_heads, cache_rows, size, seed=seed) for seed in (1, 2))
    sinks = random(heads, seed=3) if sunk else None
    gates = random(n, heads, width, size, seed=4) if gated else None
    sizes: Any = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": size,
        "scale": scale,
        "cap": cap,
    }
    mask = masks(n, width, visible, window)

    def attend(q: Tensor, gate: Tensor | None, rows: slice, mask: Tensor) -> Tensor:
        given = (q.contiguous(), keys[rows].contiguous(), values[rows].contiguous(), mask)
        gate = None if gate is None else gate.contiguous()
        with patch.object(launch, "COMBINED", combined):
            return launch.attend(*given, sinks, gate, **sizes, dtype=FLOAT)

    ours = attend(q, gates, slice(None), mask).reshape(n, width, heads, size)
    theirs = written_out(q, keys, values, mask, sinks, scale, cap)
    if gates is not None:
        theirs = theirs * gates.sigmoid()
    close(ours, theirs.transpose(1, 2), 1e-5)
    for sequence in range(n):
        for token in {0, width - 1}:
            # alone, and with more keys that it does not see
            its = mask[sequence : sequence + 1, :, token : token + 1]
            wider = torch.cat((its, torch.zeros(1, 1, 1, 640 - visible, dtype=torch.bool)), -1)
            place = np.s_[sequence : sequence + 1, :, token : token + 1]
            gate = None if gates is None else gates[place]
            for seen in (its, wider):
                one = attend(q[place], gate, slice(sequence, sequence + 1), seen)
                assert torch.equal(one.reshape(heads, size), ours[sequence, token])


def masks(n: int, width: int, visible: int, window: int | None) -> Tensor:
    """Return causal masks whose last rows see all but a few keys."""
    last = visible - 1 - torch.arange(n)[:, None] - torch.arange(width).flip(0)
    last = last.clamp(0)[:, None, :, None]
    keys = torch.arange(visible)
    seen = keys <= last
    return seen if window is None else seen & (keys > last - window)


def written_out(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    heads, visible = q.shape[1], mask.shape[-1]
    shared = heads // keys.shape[1]
    keys, values = (x[:, :, :visible].repeat_interleave(shared, 1) for x in (keys, values))
    scores = q @ keys.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        first = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((first, scores), -1).softmax(-1)[..., 1:] @ values
    return scores.softmax(-1) @ values


def test_a_row_that_sees_nothing_is_finite() -> None:
    q, cache = random(1, 2, 3, 16), random(1, 1, 300, 16)
    mask = torch.zeros(1, 1, 3, 300, dtype=torch.bool)
    sizes: Any = {"heads": 2, "kv_heads": 1, "head_dim": 16}
    mixed = launch.attend(q, cache, cache, mask, None, None, **sizes, scale=1.0, dtype=FLOAT)
    assert torch.equal(mixed, torch.zeros(3, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_key_that_overflows_reaches_nobody_who_masks_it(dtype: torch.dtype) -> None:
    """A draft's numbers may be infinite or none at all; the token before it is verified with it."""
    heads, finite = Heads(0, 2, 16, 3), random(1, 3, 64)
    for bad in (float("inf"), float("-inf"), float("nan")):
        product = finite.clone()
        product[0, 2, 32:] = bad
        results = []
        for parts in (finite, product):
            keys, values = (torch.zeros(1, 1, 40, 16, dtype=dtype) for _ in range(2))
            rest = (None, None, None, None, None, None, torch.zeros(1, dtype=torch.int64))
            q, _, _ = launch.write_attention_input(
                parts, *rest, keys, values, heads=heads, dtype=dtype
            )
            mask = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
            sizes: Any = {"heads": 2, "kv_heads": 1, "head_dim": 16, "scale": 1.0}
            results.append(launch.attend(q, keys, values, mask, None, None, **sizes, dtype=FLOAT))
        assert torch.equal(results[1][:2], results[0][:2])
        caches = [torch.zeros(1, 1, 40, 16, dtype=dtype) for _ in range(2)]
        head = Heads(32, 1, 16, 3)
        launch.write_heads(product, None, None, None, None, None, rest[-1], caches[0], heads=head)
        assert caches[0].isfinite().all()
        if dtype != FLOAT:
            rows = product[0, :, 32:48][None, None]
            operators.tensor_scatter(caches[1], rows, rest[-1], axis=-2, mode="linear")
            assert caches[1].isfinite().all()


# --- recurrence and experts -----------------------------------------------------------------------


@few
@given(
    n=st.integers(1, 2),
    width=st.integers(1, 6),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 2),
    key=st.sampled_from([8, 20]),
    value=st.sampled_from([8, 48]),
    together=st.booleans(),
    tiled=st.booleans(),
)
def test_recurrence(
    n: int,
    width: int,
    key_heads: int,
    shared: int,
    key: int,
    value: int,
    together: bool,
    tiled: bool,
) -> None:
    """Of tokens that are parts of a wider matrix, or of matrices of their own."""
    heads = key_heads * shared
    q = random(n, width, key_heads * key) / key**0.5
    sizes = [key_heads * key, heads * value, heads, heads]
    keys, values, decays, betas = random(n, width + 2, sum(sizes), seed=1)[:, 2:].split(sizes, 2)
    keys /= key**0.5
    decays.abs_().neg_()
    betas.sigmoid_()
    if not together:
        keys, values, decays, betas = (x.clone() for x in (keys, values, decays, betas))
    counts = (torch.arange(n * width).reshape(n, width, 1) % 3 > 0).float()
    state = random(n, heads, key, value, seed=2)
    sizes: Any = {"key_heads": key_heads, "key_dim": key, "value_heads": heads, "tiled": tiled}
    out, after = launch.recur(q, keys, values, decays, betas, state, counts, **sizes)
    known: Any = {"update_rule": "gated_delta", "q_num_heads": heads, "kv_num_heads": heads}
    by_head = [x.reshape(n, width, key_heads, key) for x in (q, keys)]
    repeated = [
        (x.repeat(1, 1, shared, 1) if tiled else x.repeat_interleave(shared, 2)).flatten(2)
        for x in by_head
    ]
    rates = (decays * counts, betas * counts)
    known["scale"] = key**-0.5
    expected = operators.linear_attention(*repeated, values, state, *rates, **known)
    for ours, theirs in zip((out, after), expected, strict=True):
        close(ours, theirs, 1e-5)
    for sequence in range(n):
        memory = state[sequence : sequence + 1]
        for token in range(width):
            place = slice(sequence, sequence + 1), slice(token, token + 1)
            one: Any = [x[place] for x in (q, keys, values, *rates)]
            read, memory = launch.recur(*one, memory, None, **sizes)
            assert torch.equal(read[0, 0], out[sequence, token])
        assert torch.equal(memory[0], after[sequence])


@few
@given(
    n=st.integers(1, 2),
    width=st.integers(1, 5),
    taps=st.integers(2, 4),
    channels=st.sampled_from([8, 600]),
)
def test_convolutions(n: int, width: int, taps: int, channels: int) -> None:
    x, weights = random(n, taps - 1 + width, channels), random(taps, channels, seed=1)
    ours = launch.convolve(x, weights, taps=taps)
    summed = torch.zeros(n, width, channels)
    for tap in range(taps):
        summed += x[:, tap : tap + width] * weights[tap]
    close(ours, summed * summed.sigmoid())
    for token in range(width):
        one = launch.convolve(x[:1, token : token + taps].clone(), weights, taps=taps)
        assert torch.equal(one[0, 0], ours[0, token])


@few
@given(rows=st.integers(1, 5), heads=st.sampled_from([3, 48, 300]))
def test_decays(rows: int, heads: int) -> None:
    """Of columns of a wider matrix, and of numbers whose softplus is almost 0 or themselves."""
    gates = 20 * random(rows, 2 * heads)
    x, bias, rates = gates[:, heads:], random(heads, seed=1), -random(heads, seed=2).exp()
    ours = launch.decays(x[None], bias, rates)[0]
    torch.testing.assert_close(ours, rates * softplus(x + bias), atol=1e-12, rtol=1e-5)
    assert_rows_alone(ours, lambda row: launch.decays(alone(x, row), bias, rates))


@few
@given(rows=st.integers(1, 5), heads=st.integers(1, 3), size=st.sampled_from([8, 48, 128]))
def test_gated_norms(rows: int, heads: int, size: int) -> None:
    """The gate is a part of a wider matrix."""
    x, weight = random(1, rows, heads * size), random(size, seed=1)
    sizes: Any = {"heads": heads, "size": size}
    gate = random(rows, 3 + heads * size, seed=2)[:, 3:]

    def normed(x: Tensor, gate: Tensor) -> Tensor:
        return launch.gated_norm(x, weight, gate, **sizes, epsilon=1e-6, dtype=FLOAT)

    ours = normed(x, gate)
    by_head = x.reshape(1, rows, heads, size)
    expected = operators.rms_norm(by_head, weight, axis=-1, epsilon=1e-6).reshape(rows, -1)
    close(ours, expected * gate * gate.sigmoid())
    assert_rows_alone(ours, lambda row: normed(chunk(x, row), alone(gate, row)))


def test_a_masked_token_leaves_the_state_as_it_is() -> None:
    state, zeros = random(1, 2, 8, 8), torch.zeros(1, 1, 2)
    given = [random(1, 1, 16, seed=seed) for seed in range(3)]
    sizes: Any = {"key_heads": 2, "key_dim": 8, "value_heads": 2, "tiled": 0}
    _, after = launch.recur(*given, zeros, zeros, state, None, **sizes)
    assert torch.equal(after, state)
    ones = zeros + 1
    _, after = launch.recur(*given, -ones, ones, state, zeros[:, :, :1], **sizes)
    assert torch.equal(after, state)


@few
@given(
    rows=st.integers(1, 20),
    count=st.integers(2, 6),
    chosen=st.integers(1, 2),
    depth=st.sampled_from([16, 70]),
    columns=st.sampled_from([16, 70]),
    separate=st.booleans(),
)
def test_experts(
    rows: int, count: int, chosen: int, depth: int, columns: int, separate: bool
) -> None:
    x = random(count if separate else 1, rows, depth)
    stack = random(count, depth, columns, seed=1)
    best = random(rows, count, seed=2).topk(chosen).indices
    shares = torch.zeros(rows, count).scatter(1, best, random(rows, chosen, seed=3).sigmoid())
    shares = shares.T[:, :, None].contiguous()

    def mixture(x: Tensor, shares: Tensor) -> Tensor:
        return launch.add_experts(launch.experts(x, stack, shares), shares)

    ours = mixture(x, shares)
    close(ours, (torch.matmul(x, stack) * shares).sum(0))
    assert_rows_alone(ours, lambda row: mixture(x[:, row : row + 1], shares[:, row : row + 1]))
