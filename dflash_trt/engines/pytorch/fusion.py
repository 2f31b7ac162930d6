"""Patterns of calls, and the kernels that do the same with fewer.

What matches no pattern stays as it is: it is elementwise, or moves numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dflash_trt.engines.pytorch import launch
from dflash_trt.engines.pytorch.launch import Heads
from dflash_trt.engines.pytorch.program import Call, Calls, Program, with_last_uses

# calls that matter even if nobody reads them
WRITES = ("Store", "TensorScatter", "WriteAttentionInput", "WriteHeads")
SWAPPED = (0, 2, 1, 3)  # tokens and heads


@dataclass(frozen=True)
class Match:
    old: Sequence[Call]
    new: Sequence[Call]


class View:
    """Calls with who makes and reads each value."""

    def __init__(self, calls: Calls, program: Program, dtype: torch.dtype) -> None:
        self.calls = calls.calls
        self.program = program
        self.dtype = dtype
        self._shapes = calls.shapes
        self._results = calls.results
        self._places: dict[str, int] = {}
        self._makers: dict[str, Call] = {}
        self._readers: dict[str, list[Call]] = {}
        for place, call in enumerate(self.calls):
            self._places[call.output] = place
            for name in call.outputs:
                self._makers[name] = call
            for name in dict.fromkeys(call.inputs):
                self._readers.setdefault(name, []).append(call)

    def maker(self, name: object, op: str) -> Call | None:
        """Return the call of kind `op` that makes a value."""
        call = self._makers.get(name) if isinstance(name, str) else None
        return call if call is not None and call.op == op else None

    def readers(self, name: str) -> list[Call]:
        return self._readers.get(name, [])

    def reader(self, name: str, op: str) -> Call | None:
        """Return the call of kind `op` that alone reads a value."""
        readers = self.readers(name)
        if len(readers) != 1 or readers[0].op != op or name in self._results:
            return None
        return readers[0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name].shape)

    def place(self, call: Call) -> int:
        return self._places[call.output]

    def is_made_before(self, name: str, call: Call) -> bool:
        return name in self._makers and self.place(self._makers[name]) < self.place(call)

    def is_read(self, call: Call) -> bool:
        return any(self.readers(name) or name in self._results for name in call.outputs)

    def is_weight(self, name: object) -> bool:
        return name in self.program.weights

    def number(self, name: object) -> float:
        """Return a constant of one number."""
        assert isinstance(name, str)
        return self.program.weights[name].item()

    def narrow(self, name: str) -> torch.dtype:
        """Return the type in which a value is stored: of the weights, if only products read it."""
        products = all(call.op in ("Attend", "Linear") for call in self.readers(name))
        return self.dtype if products and name not in self._results else torch.float32


Pattern = Callable[[View, Call], Match | None]


def fuse(program: Program, calls: Calls, dtype: torch.dtype) -> Calls:
    """Replace calls by kernels; dtype: of the program's matrices."""
    for pattern in PATTERNS:
        calls = _replace_all(pattern, View(calls, program, dtype), calls)
        calls = _without_unread(calls, program, dtype)
    return replace(calls, calls=with_last_uses(calls))


def _replace_all(pattern: Pattern, view: View, calls: Calls) -> Calls:
    gone: set[str] = set()
    new: dict[int, Sequence[Call]] = {}
    for call in calls.calls:
        match = pattern(view, call)
        if match is None or _reads_too_early(view, match):
            continue
        gone |= {old.output for old in match.old}
        new[max(map(view.place, match.old))] = match.new
    left = []
    for place, call in enumerate(calls.calls):
        if call.output not in gone:
            left.append(call)
        left.extend(new.get(place, ()))
    return replace(calls, calls=left)


def _reads_too_early(view: View, match: Match) -> bool:
    """Whether someone reads a value before all is there that it is now made of."""
    gone = {call.output for call in match.old}
    last = max(map(view.place, match.old))
    readers = [reader for new in match.new for name in new.outputs for reader in view.readers(name)]
    return any(view.place(call) < last for call in readers if call.output not in gone)


def _without_unread(calls: Calls, program: Program, dtype: torch.dtype) -> Calls:
    while True:
        view = View(calls, program, dtype)
        left = [call for call in calls.calls if call.op in WRITES or view.is_read(call)]
        if len(left) == len(calls.calls):
            return calls
        calls = replace(calls, calls=left)


# --- products -------------------------------------------------------------------------------------


def product(view: View, call: Call) -> Match | None:
    """Match a product with a weight; its parts are added up by a call of their own."""
    if call.op not in ("Gemm", "MatMul"):
        return None
    x, weight, *bias = call.arguments
    assert isinstance(weight, str)
    if len(view.shape(weight)) != 2 or len(view.shape(str(x))) != 2:
        return None
    scaled = view.maker(weight, "DequantizeLinear")
    block = 0
    if scaled is not None:
        matrix = scaled.arguments
        block = scaled.attributes.get("block_size", 0)
    elif view.is_weight(weight):
        turned = weight if call.attributes.get("transB") else view.program.transposed(weight)
        matrix = (turned, None)
    else:
        return None
    parts = f"{call.output}:parts"
    linear = Call(
        "Linear", launch.linear, (x, *matrix), (parts,), {"dtype": view.dtype, "block": block}
    )
    add_up = Call("AddUp", launch.add_up, (parts, bias[0] if bias else None), call.outputs)
    return Match([call], [linear, add_up])


def add_norm(view: View, call: Call) -> Match | None:
    """Match a product that is added to the residual stream, and the norm of the sum."""
    add = view.reader(call.output, "Add") if call.op == "AddUp" else None
    if add is None or view.shape(add.inputs[0]) != view.shape(add.inputs[-1]):
        return None
    norms = [read for read in view.readers(add.output) if read.op == "RMSNormalization"]
    if len(norms) != 1:
        return None
    (norm,) = norms
    residual = next(name for name in add.inputs if name != call.output)
    fused = Call(
        "AddNorm",
        launch.add_norm,
        (*call.arguments, residual, norm.arguments[1]),
        (add.output, norm.output),
        {"epsilon": norm.attributes["epsilon"], "dtype": view.narrow(norm.output)},
    )
    return Match([call, add, norm], [fused])


def gated(view: View, call: Call) -> Match | None:
    """Match gate and up, and what the activation makes of gate times up."""
    split = view.reader(call.output, "Split") if call.op == "AddUp" else None
    if split is None or len(split.outputs) != 2 or split.attributes["axis"] not in (-1, 1):
        return None
    gate, up = split.outputs
    if view.shape(gate) != view.shape(up):
        return None
    activation = _activation(view, gate)
    multiply = view.reader(activation[-1].output, "Mul") if activation else None
    if multiply is None or view.reader(up, "Mul") is not multiply:
        return None
    fused = Call(
        "Gated",
        launch.gated,
        call.arguments,
        multiply.outputs,
        {"gelu": activation[0].op == "Gelu", "dtype": view.narrow(multiply.output)},
    )
    return Match([call, split, *activation, multiply], [fused])


def _activation(view: View, gate: str) -> list[Call]:
    """Return the calls of SiLU or GELU of a value; none if there is neither."""
    gelu = view.reader(gate, "Gelu")
    if gelu is not None:
        return [gelu]
    readers = view.readers(gate)
    sigmoid = next((read for read in readers if read.op == "Sigmoid"), None)
    if sigmoid is None or len(readers) != 2:
        return []
    silu = view.reader(sigmoid.output, "Mul")
    if silu is None or {*silu.inputs} != {gate, sigmoid.output}:
        return []
    return [sigmoid, silu]


# --- attention ------------------------------------------------------------------------------------


def attention(view: View, call: Call) -> Match | None:
    """Match attention, in one call or written out; the kernel reads whole caches."""
    matched = _attention(view, call) if call.op == "Attention" else _written_out(view, call)
    if matched is None:
        return None
    old, fused = matched
    result = old[-1]
    n, heads, width, size = view.shape(result.output)
    swap = view.reader(result.output, "Transpose")
    rows = view.reader(swap.output, "Reshape") if swap is not None else None
    if swap is not None and rows is not None and tuple(swap.attributes["perm"]) == SWAPPED:
        attend = _attend(view, fused, rows.output)
        return Match([*old, swap, rows], [attend])
    attend = _attend(view, fused, f"{result.output}:rows")
    back = partial(_by_head, shape=(n, width, heads, size))
    return Match(old, [attend, Call("ByHead", back, attend.outputs, result.outputs)])


@dataclass(frozen=True)
class _Attention:
    q: str
    keys: str
    values: str
    mask: str
    sinks: str | None
    scale: float
    cap: float | None


def _attend(view: View, matched: _Attention, output: str) -> Call:
    return Call(
        "Attend",
        launch.attend,
        (matched.q, matched.keys, matched.values, matched.mask, matched.sinks),
        (output,),
        {
            "visible": view.shape(matched.mask)[-1],
            "scale": matched.scale,
            "cap": matched.cap,
            "dtype": view.narrow(output),
        },
    )


def _by_head(rows: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    return rows.reshape(shape).transpose(1, 2)


def _cache(view: View, name: object) -> str | None:
    """Return the cache whose first rows a value is."""
    first_rows = view.maker(name, "Slice")
    if first_rows is None or first_rows.arguments[1:4:2] != ((0,), (2,)):
        return None
    cache = view.maker(first_rows.arguments[0], "TensorScatter")
    return None if cache is None else cache.output


def _attention(view: View, call: Call) -> tuple[list[Call], _Attention] | None:
    q, keys, values, mask = call.inputs
    caches = _cache(view, keys), _cache(view, values)
    if caches[0] is None or caches[1] is None:
        return None
    scale = call.attributes["scale"]
    return [call], _Attention(q, caches[0], caches[1], mask, None, scale, None)


def _written_out(view: View, call: Call) -> tuple[list[Call], _Attention] | None:
    """Match attention with a cap on scores, or with sinks (`graphs.attention`), from its mixing."""
    values = _cache(view, call.arguments[1]) if call.op == "MatMul" else None
    shares = view.maker(call.arguments[0], "Reshape") if values is not None else None
    result = view.reader(call.output, "Reshape")
    if values is None or shares is None or result is None:
        return None
    without_sinks = view.maker(shares.arguments[0], "Slice")
    softmax = view.maker((without_sinks or shares).arguments[0], "Softmax")
    if softmax is None:
        return None
    sinks, masked = None, view.maker(softmax.arguments[0], "Where")
    with_sinks = view.maker(softmax.arguments[0], "Concat")
    if with_sinks is not None:
        expanded = view.maker(with_sinks.arguments[0], "Expand")
        masked = view.maker(with_sinks.arguments[1], "Where")
        sinks = expanded.inputs[0] if expanded is not None else None
    if masked is None or (with_sinks is not None) != view.is_weight(sinks):
        return None
    scores = view.maker(masked.arguments[1], "Reshape")
    if scores is None:
        return None
    score, cap = scores.inputs[0], None
    capped = view.maker(score, "Mul")
    if capped is not None:
        tangent = view.maker(capped.arguments[0], "Tanh")
        divided = view.maker(tangent.arguments[0], "Div") if tangent is not None else None
        if divided is None:
            return None
        score, cap = divided.inputs[0], view.number(capped.arguments[1])
    dots = view.maker(score, "MatMul")
    turned = view.maker(dots.arguments[1], "Transpose") if dots is not None else None
    folded = view.maker(dots.arguments[0], "Reshape") if dots is not None else None
    scaled = view.maker(folded.arguments[0], "Mul") if folded is not None else None
    keys = _cache(view, turned.arguments[0]) if turned is not None else None
    if scaled is None or keys is None:
        return None
    scale = view.number(scaled.arguments[1])
    mask = masked.inputs[0]
    matched = _Attention(scaled.inputs[0], keys, values, mask, sinks, scale, cap)
    return [call, result], matched


def heads(view: View, call: Call) -> Match | None:
    """Match heads that are split, normed, rotated and written into a cache."""
    rows = view.reader(call.output, "Reshape") if call.op == "AddUp" else None
    swap = view.reader(rows.output, "Transpose") if rows is not None else None
    if rows is None or swap is None or tuple(swap.attributes["perm"]) != SWAPPED:
        return None
    split = view.reader(swap.output, "Split")
    names = swap.outputs if split is None else split.outputs
    old = [call, rows, swap, *([] if split is None else [split])]
    new, first = [], 0
    for name in names:
        _, count, width, size = view.shape(name)
        whole = Heads(first=first, count=count, size=size, width=width)
        first += count * size
        for part in _interleaved(view, name, whole) or [_Part(name, whole)]:
            steps = list(_steps(view, part.name))
            old += [*part.calls, *steps]
            new.append(_of_heads(view, call, part.heads, steps, part.name))
    together = _together(new)
    return Match(old, new if together is None else [together])


@dataclass(frozen=True)
class _Part:
    """Some heads of a product, and the calls that take them out."""

    name: str
    heads: Heads
    calls: Sequence[Call] = ()


def _interleaved(view: View, name: str, whole: Heads) -> list[_Part]:
    """Return heads that take turns, as queries and their gates; none if all are alike."""
    parts = []
    for call in view.readers(name):
        if call.op != "Slice" or len(call.arguments) != 5 or call.arguments[3] != (1,):
            return []
        starts, steps = call.arguments[1], call.arguments[4]
        assert isinstance(starts, tuple)
        assert isinstance(steps, tuple)
        heads = replace(
            whole,
            first=whole.first + starts[0] * whole.size,
            count=view.shape(call.output)[1],
            between=(steps[0] - 1) * whole.size,
        )
        parts.append(_Part(call.output, heads, [call]))
    return parts


def _steps(view: View, name: str) -> Iterator[Call]:
    """Yield what happens to heads, in this order: norm, rotation, writing; each may be missing."""
    for op, place in (("RMSNormalization", 0), ("RotaryEmbedding", 0), ("TensorScatter", 1)):
        step = view.reader(name, op)
        if step is not None and step.arguments[place] == name:
            yield step
            name = step.output


def _of_heads(view: View, product: Call, some: Heads, steps: list[Call], name: str) -> Call:
    by_op = {step.op: step for step in steps}
    norm, turn = by_op.get("RMSNormalization"), by_op.get("RotaryEmbedding")
    weight, rotation = None, (None, None, None)
    if norm is not None:
        weight = norm.arguments[1]
        some = replace(some, epsilon=norm.attributes["epsilon"])
    arguments = (*product.arguments, weight, *rotation)
    if turn is not None:
        rotated = turn.attributes.get("rotary_embedding_dim") or some.size
        some = replace(some, rotated=rotated)
        arguments = (*product.arguments, weight, *turn.arguments[1:])
    write = by_op.get("TensorScatter")
    if write is not None:
        cache, _, write_index = write.arguments
        arguments = (*arguments, write_index, cache)
        return Call("WriteHeads", launch.write_heads, arguments, write.outputs, {"heads": some})
    output = steps[-1].output if steps else name
    attributes = {"heads": some, "dtype": view.narrow(output)}
    return Call("SplitHeads", launch.split_heads, arguments, (output,), attributes)


def _together(calls: Sequence[Call]) -> Call | None:
    """Return one call in place of those of queries, keys and values, where they are alike."""
    if [call.op for call in calls] != ["SplitHeads", "WriteHeads", "WriteHeads"]:
        return None
    query, key, value = calls
    heads, of_key, of_value = (call.attributes["heads"] for call in calls)
    if replace(of_key, first=heads.first, count=heads.count) != heads:
        return None
    if of_value != Heads(of_value.first, of_key.count, heads.size, heads.width):
        return None  # values are normed or rotated, too
    parts, bias, q_weight, *rotation = query.arguments
    _, _, key_weight, *key_rotation, write_index, keys = key.arguments
    *_, value_index, values = value.arguments
    if key_rotation != rotation or value_index != write_index:
        return None
    return Call(
        "WriteAttentionInput",
        launch.write_attention_input,
        (parts, bias, q_weight, key_weight, *rotation, write_index, keys, values),
        (query.output, key.output, value.output),
        query.attributes,
    )


# --- experts --------------------------------------------------------------------------------------


def expert_sum(view: View, call: Call) -> Match | None:
    """Match the sum of what all experts make of a token, times its share of each."""
    if call.op != "ReduceSum" or call.arguments[1] != (0,):
        return None
    weighted = view.maker(call.arguments[0], "Mul")
    if weighted is None or len(view.shape(weighted.output)) != 3:
        return None
    fused = Call("AddExperts", launch.add_experts, weighted.arguments, call.outputs)
    return Match([weighted, call], [fused])


def expert_product(view: View, call: Call) -> Match | None:
    """Match a product with all experts; those that no token chose are left out."""
    if call.op != "MatMul" or not view.is_weight(call.arguments[1]):
        return None
    x, stack = call.inputs
    sums = [other for other in view.calls if other.op == "AddExperts"]
    after = [other for other in sums if view.place(other) > view.place(call)]
    if len(view.shape(stack)) != 3 or not after:
        return None
    _, shares = after[0].inputs  # of the same layer
    if not view.is_made_before(shares, call):
        return None
    return Match([call], [Call("Experts", launch.experts, (x, stack, shares), call.outputs)])


# --- linear attention -----------------------------------------------------------------------------


def convolution(view: View, call: Call) -> Match | None:
    """Match a sum of shifted tokens times weights, and SiLU of it."""
    activation = _activation(view, call.output) if call.op == "Sum" else []
    if not activation:
        return None
    shifts: list[Call] = []
    products: list[Call] = []
    for place, name in enumerate(call.inputs):
        taps = _chain(view.maker, name, "Mul", "Slice")
        if taps is None:
            return None
        product, shift = taps
        if view.reader(product.output, "Sum") is not call:
            return None
        if view.reader(shift.output, "Mul") is not product:
            return None
        if not view.is_weight(product.inputs[1]) or shift.arguments[1:4:2] != ((place,), (1,)):
            return None
        shifts.append(shift)
        products.append(product)
    tokens = shifts[0].arguments[0]
    if any(shift.arguments[0] != tokens for shift in shifts):
        return None
    weights = view.program.stacked([product.inputs[1] for product in products])
    fused = Call("Convolve", launch.convolve, (tokens, weights), activation[-1].outputs)
    return Match([*shifts, *products, call, *activation], [fused])


def decay(view: View, call: Call) -> Match | None:
    """Match rates times a softplus that is written out (`graphs.delta_net`), by its logarithm."""
    if call.op != "Atanh":
        return None
    before = _chain(view.maker, call.inputs[0], "Div", "Exp", "Neg", "Abs", "Add")
    after = _chain(view.reader, call.output, "Add", "Add", "Mul")
    if before is None or after is None:
        return None
    division, *_, biased = before
    _, softplus, result = after
    wide = view.maker(division.inputs[1], "Add")
    relu = view.maker(softplus.inputs[0], "Relu")
    if wide is None or relu is None or relu.inputs != [biased.output]:
        return None
    (x, bias), rates = biased.inputs, result.inputs[1]
    if not view.is_weight(bias) or not view.is_weight(rates):
        return None
    fused = Call("Decays", launch.decays, (x, bias, rates), result.outputs)
    return Match([*before, wide, call, relu, *after], [fused])


def gated_norm(view: View, call: Call) -> Match | None:
    """Match a norm of heads, times SiLU of a gate."""
    if call.op != "RMSNormalization":
        return None
    after = _chain(view.reader, call.output, "Reshape", "Mul")
    if after is None:
        return None
    rows, product = after
    activated = view.maker(next(name for name in product.inputs if name != rows.output), "Mul")
    gate = activated.inputs[0] if activated is not None else ""
    activation = _activation(view, gate)
    if not activation or activation[-1] is not activated:
        return None
    attributes = {"epsilon": call.attributes["epsilon"], "dtype": view.narrow(product.output)}
    arguments = (*call.arguments, gate)
    fused = Call("GatedNorm", launch.gated_norm, arguments, product.outputs, attributes)
    return Match([call, rows, *activation, product], [fused])


def _chain(find: Callable[[str, str], Call | None], name: str, *ops: str) -> list[Call] | None:
    """Return the calls of kinds `ops` one after the other from a value on; None if one is missing.

    find: `View.reader`, and each call's output leads to the next, or `View.maker`, and its first
    input does.
    """
    calls: list[Call] = []
    for op in ops:
        call = find(name, op)
        if call is None:
            return None
        calls.append(call)
        name = call.inputs[0] if name in call.outputs else call.output
    return calls


# --- one call for one -----------------------------------------------------------------------------


def norm(view: View, call: Call) -> Match | None:
    """Match a norm that is part of nothing larger."""
    if call.op != "RMSNormalization":
        return None
    attributes = {"epsilon": call.attributes["epsilon"], "dtype": view.narrow(call.output)}
    return Match([call], [Call("Norm", launch.norm, call.arguments, call.outputs, attributes)])


def recurrence(view: View, call: Call) -> Match | None:
    """Match linear attention, with heads that are repeated and tokens that do not count."""
    if call.op != "LinearAttention":
        return None
    q, keys, values, state, decays, betas = call.inputs
    q, keys = _before_repeated(view, q), _before_repeated(view, keys)
    counts = None
    counted = [view.maker(name, "Mul") for name in (decays, betas)]
    if counted[0] is not None and counted[1] is not None:
        (decays, counts), (betas, also) = counted[0].inputs, counted[1].inputs
        if counts != also or view.shape(counts)[-1] != 1:
            return None
    arguments = (q, keys, values, state, decays, betas, counts)
    attributes = {"scale": call.attributes["scale"]}
    return Match([call], [Call("Recur", launch.recur, arguments, call.outputs, attributes)])


def _before_repeated(view: View, name: str) -> str:
    """Return the heads that a value repeats one beside the other (`delta_net._repeat`), or it."""
    before = _chain(view.maker, name, "Reshape", "Concat", "Reshape")
    if before is None:
        return name
    _, repeated, by_head = before
    if repeated.attributes["axis"] != 3 or len({*repeated.inputs}) != 1:
        return name
    return by_head.inputs[0]


PATTERNS: tuple[Pattern, ...] = (
    product, attention, heads, add_norm, gated, expert_sum, expert_product, convolution, decay,
    gated_norm, norm, recurrence,
)  # fmt: skip
