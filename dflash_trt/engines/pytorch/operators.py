"""The operators of our graphs in PyTorch, on any device.

A function gets the node's inputs and attributes. Inputs of `SIZES` are numbers of the host. Numbers
between operators are float32; weights and KV caches may have 16 bits.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MASKED = -6e4  # score of a masked key; finite, so that a row without keys is too
MOST_SORTED = 4096  # longer rows are logits, of which a tie changes no text
TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    16: torch.bfloat16,
}  # by ONNX's number
Sizes = Sequence[int]


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Attend with queries `[n, heads, S, head_dim]`; heads of one kv head share its keys.

    A query that sees no key gets 0.
    """
    n, heads, width, _ = q.shape
    kv_heads = keys.shape[1]
    folded = q.reshape(n, kv_heads, -1, q.shape[-1])
    scores = matmul(folded, keys.transpose(-1, -2)) * scale
    scores = scores.reshape(n, heads, width, -1).masked_fill(~mask, MASKED)
    shares = torch.softmax(scores, -1) * mask.any(-1, keepdim=True)
    shares = shares.reshape(n, kv_heads, heads // kv_heads * width, -1)
    return matmul(shares, values).reshape(n, heads, width, -1)


def cast(x: Tensor, *, to: int) -> Tensor:
    return x.to(TYPES[to])


def concat(*parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, axis)


def dequantize_linear(codes: Tensor, scale: Tensor, *, axis: int, block_size: int = 0) -> Tensor:
    """Widen a matrix with a scale for each block, or without blocks for each row."""
    if not block_size:
        assert axis == 0
        return codes.float() * scale[:, None]
    whole = scale.repeat_interleave(block_size, axis)
    return codes.float() * whole.narrow(axis, 0, codes.shape[axis])  # the last may be cut off


def divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else x // y


def expand(x: Tensor, sizes: Sizes) -> Tensor:
    return x.expand([max(axis) for axis in zip(x.shape, sizes, strict=True)])


def gather(x: Tensor, places: Tensor, *, axis: int = 0) -> Tensor:
    """Index one axis; numbers come out as float32, whatever a table holds."""
    index: list[Any] = [slice(None)] * (axis % x.dim())
    taken = x[(*index, places)]
    return taken.float() if taken.is_floating_point() else taken


def gather_nd(x: Tensor, places: Tensor, *, batch_dims: int) -> Tensor:
    """Take rows `places` `[n, k, 1]` of each sequence of `[n, rows, ...]`."""
    assert batch_dims == 1
    return x[_each_sequence(x), places[..., 0]]


def gelu(x: Tensor, *, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transB: int = 0) -> Tensor:
    product = matmul(x, weight.T if transB else weight)
    return product if bias is None else product + bias


def linear_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    decays: Tensor,
    betas: Tensor,
    *,
    update_rule: str,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over `[n, S, heads * size]` from a state `[n, heads, dk, dv]`."""
    assert update_rule == "gated_delta"
    assert q_num_heads == kv_num_heads
    n, width, _ = q.shape
    q, keys, values = (x.reshape(n, width, kv_num_heads, -1) for x in (q, keys, values))
    mixed = [torch.empty_like(values[:, :0])]
    for token in range(width):
        key = keys[:, token, :, :, None]
        state = state * decays[:, token, :, None, None].exp()
        known = (key * state).sum(2)
        change = (values[:, token] - known) * betas[:, token, :, None]
        state = state + key * change[:, :, None]
        mixed.append((q[:, token, :, :, None] * state).sum(2, keepdim=True).transpose(1, 2) * scale)
    return torch.cat(mixed, 1).reshape(n, width, -1), state


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply numbers of the second one's type, and add up in float32, as the kernels do."""
    return torch.matmul(x.to(y.dtype).float(), y.float())


def pad(x: Tensor, pads: Sizes) -> Tensor:
    """Pad with zeros; pads: all axes' numbers before, then all after."""
    before, after = pads[: x.dim()], pads[x.dim() :]
    pairs = zip(reversed(before), reversed(after), strict=True)
    return F.pad(x, [number for pair in pairs for number in pair])


def reduce_max(x: Tensor, axes: Sizes, *, keepdims: int = 1) -> Tensor:
    return x.amax(tuple(axes), bool(keepdims))


def reduce_sum(x: Tensor, axes: Sizes, *, keepdims: int = 1) -> Tensor:
    return x.sum(tuple(axes), bool(keepdims))


def reshape(x: Tensor, sizes: Sizes) -> Tensor:
    """Reshape; 0 keeps an axis."""
    return x.reshape([size or x.shape[axis] for axis, size in enumerate(sizes)])


def rms_norm(x: Tensor, weight: Tensor, *, axis: int, epsilon: float) -> Tensor:
    assert axis == -1
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, rotary_embedding_dim: int = 0
) -> Tensor:
    """Rotate the first numbers of each head, by default all; x `[n, heads, S, head_dim]`."""
    rotated = rotary_embedding_dim or x.shape[-1]
    cos, sin = (table[positions].unsqueeze(1) for table in (cos, sin))
    first, second = x[..., :rotated].chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., rotated:]), -1)


def slice_axes(
    x: Tensor,
    starts: Sizes,
    ends: Sizes,
    axes: Sizes | None = None,
    steps: Sizes | None = None,
) -> Tensor:
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    index = [slice(None)] * x.dim()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def split(
    x: Tensor, sizes: Sizes | None = None, *, axis: int = 0, num_outputs: int = 0
) -> Sequence[Tensor]:
    part_sizes = list(sizes) if sizes is not None else x.shape[axis] // num_outputs
    return torch.split(x, part_sizes, axis)


def tensor_scatter(
    cache: Tensor, rows: Tensor, at: Tensor | None = None, *, axis: int, mode: str
) -> Tensor:
    """Write rows of each sequence in place, from row `at` `[n]` on; axis is the last but one."""
    assert (axis, mode) == (-2, "linear")
    width = rows.shape[-2]
    if cache.dtype != torch.float32:
        # 0 times infinity would reach rows that mask them
        limits = torch.finfo(cache.dtype)
        rows = rows.nan_to_num(0.0, limits.max, limits.min).clamp(limits.min, limits.max)
    rows = rows.to(cache.dtype)
    if at is None:
        cache.narrow(-2, 0, width).copy_(rows)
        return cache
    places = at[:, None] + torch.arange(width, device=cache.device)
    cache.movedim(-2, 1)[_each_sequence(cache), places] = rows.movedim(-2, 1)
    return cache


def top_k(x: Tensor, k: Sizes, *, axis: int = -1, largest: int = 1) -> tuple[Tensor, Tensor]:
    """Return the largest numbers and their places; of equal ones the first, except of logits."""
    count = k[0]
    if count == 1 and largest:
        best = x.max(axis, keepdim=True)
        return best.values, best.indices
    if x.shape[axis] > MOST_SORTED:
        values, places = torch.topk(x, count, axis, bool(largest))
        return values, places
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, count), places.narrow(axis, 0, count)


def squeeze(x: Tensor, axes: Sizes) -> Tensor:
    return x.squeeze(tuple(axes))


def unsqueeze(x: Tensor, axes: Sizes) -> Tensor:
    for axis in axes:
        x = x.unsqueeze(axis)
    return x


def transpose(x: Tensor, *, perm: Sizes) -> Tensor:
    return x.permute(*perm)


def softmax(x: Tensor, *, axis: int) -> Tensor:
    return torch.softmax(x, axis)


def number_range(start: Sizes, limit: Sizes, step: Sizes) -> Tensor:
    return torch.arange(*start, *limit, *step)


def _each_sequence(x: Tensor) -> Tensor:  # int64 [n, 1]
    return torch.arange(len(x), device=x.device)[:, None]


def _of_all(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *parts: reduce(combine, parts)


# inputs that are numbers of the host, by place
SIZES: dict[str, Sequence[int]] = {
    "Expand": [1],
    "Pad": [1],
    "Range": [0, 1, 2],
    "ReduceMax": [1],
    "ReduceSum": [1],
    "Reshape": [1],
    "Slice": [1, 2, 3, 4],
    "Split": [1],
    "Squeeze": [1],
    "TopK": [1],
    "Unsqueeze": [1],
}
OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "And": torch.logical_and,
    "Atanh": torch.atanh,
    "Attention": attention,
    "Cast": cast,
    "Concat": concat,
    "DequantizeLinear": dequantize_linear,
    "Div": divide,
    "Equal": torch.eq,
    "Exp": torch.exp,
    "Expand": expand,
    "Gather": gather,
    "GatherND": gather_nd,
    "Gelu": gelu,
    "Gemm": gemm,
    "Identity": lambda x: x,
    "Less": torch.lt,
    "LinearAttention": linear_attention,
    "MatMul": matmul,
    "Max": _of_all(torch.maximum),
    "Min": _of_all(torch.minimum),
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Or": torch.logical_or,
    "Pad": pad,
    "RMSNormalization": rms_norm,
    "Range": number_range,
    "ReduceMax": reduce_max,
    "ReduceSum": reduce_sum,
    "Relu": torch.relu,
    "Reshape": reshape,
    "RotaryEmbedding": rotary_embedding,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Slice": slice_axes,
    "Softmax": softmax,
    "Split": split,
    "Squeeze": squeeze,
    "Sub": torch.sub,
    "Sum": _of_all(torch.add),
    "Tanh": torch.tanh,
    "TensorScatter": tensor_scatter,
    "TopK": top_k,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Where": torch.where,
}
