"""ONNX Runtime's product with packed weights (MatMulNBits) alone; docs/benchmarks.md shows it.

    python scripts/quantized_products.py

Times are the least of 15, of 30 layers of 576 x 1536 and 1536 x 576 and a head of 576 x 49152, by
rows of input; rows alone: how far a row computed alone is from the same row among 64, at most, over
the standard deviation of the logits. All forms take turns in a process; a quiet machine is wanted.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

LAYERS, HIDDEN, INNER, VOCAB = 30, 576, 1536, 49152
ROWS = (1, 2, 4, 8, 16)
TURNS, THREADS = 15, 2


class Form(NamedTuple):
    """level: `accuracy_level`, 4 rounds inputs to 8 bits and others do not; bits 32: plain."""

    bits: int
    block: int = 32
    level: int = 4
    zeros: bool = False


FORMS = (
    Form(32),
    *(Form(8, *each) for each in ((32,), (32, 4, True), (64,), (128,), (32, 0), (64, 0))),
    *(Form(4, *each) for each in ((32,), (32, 4, True), (64,), (128,), (32, 0), (64, 0))),
)


def session(form: Form) -> ort.InferenceSession:
    rng, nodes, weights = np.random.default_rng(0), [], []

    def product(x: str, wide: int, out: int, name: str) -> str:
        if form.bits == 32:
            plain = (rng.random((out, wide), np.float32) - 0.5) / wide**0.5
            weights.append(numpy_helper.from_array(plain, f"{name}_w"))
            nodes.append(helper.make_node("Gemm", [x, f"{name}_w"], [name], transB=1))
            return name
        blocks = -(-wide // form.block)
        size = (out, blocks, form.block * form.bits // 8)
        given = {"w": rng.integers(0, 256, size, np.uint8)}
        given["s"] = (rng.random((out, blocks), np.float32) + 0.5) / 2**form.bits / wide**0.5
        if form.zeros:
            given["z"] = rng.integers(96, 160, (out, -(-blocks * form.bits // 8)), np.uint8)
        weights.extend(numpy_helper.from_array(x, f"{name}_{key}") for key, x in given.items())
        shape: dict[str, Any] = {"K": wide, "N": out, "bits": form.bits, "block_size": form.block}
        names = [x, *(f"{name}_{key}" for key in given)]
        node = helper.make_node(
            "MatMulNBits",
            names,
            [name],
            domain="com.microsoft",
            **shape,
            accuracy_level=form.level,
        )
        nodes.append(node)
        return name

    x = "x"
    weights.append(numpy_helper.from_array(np.ones(HIDDEN, np.float32), "ones"))
    for layer in range(LAYERS):
        inner = product(x, HIDDEN, INNER, f"up_{layer}")
        out = product(inner, INNER, HIDDEN, f"down_{layer}")
        x = f"norm_{layer}"
        nodes.append(helper.make_node("RMSNormalization", [out, "ones"], [x], axis=-1))
    product(x, HIDDEN, VOCAB, "logits")
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])
        for name, size in (("x", HIDDEN), ("logits", VOCAB))
    ]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def main() -> None:
    x = np.random.default_rng(1).standard_normal((64, HIDDEN)).astype(np.float32)
    sessions = {form: session(form) for form in FORMS}
    seconds: dict[tuple[Form, int], list[float]] = {}
    for _ in range(TURNS):
        for form, each in sessions.items():
            each.run(None, {"x": x[:1]})  # the caches hold another form's weights
            for rows in ROWS:
                start = time.perf_counter()
                each.run(None, {"x": x[:rows]})
                seconds.setdefault((form, rows), []).append(time.perf_counter() - start)
    print(f"onnxruntime {ort.__version__}, onnx {onnx.__version__}, {THREADS} threads, ms by rows")
    print(f"| bits | block | level | zero points | {' | '.join(map(str, ROWS))} | rows alone |")
    print("|---|---|---|---|" + "---|" * (len(ROWS) + 1))
    for form, each in sessions.items():
        times = (f"{1000 * min(seconds[form, rows]):.1f}" for rows in ROWS)
        many = each.run(None, {"x": x})[0]
        farthest = max(
            float(np.abs(each.run(None, {"x": x[:rows]})[0] - many[:rows]).max() / many.std())
            for rows in ROWS
        )
        zeros = "yes" if form.zeros else "no"
        block, level = (form.block, form.level) if form.bits < 32 else ("", "")
        print(
            f"| {form.bits} | {block} | {level} | {zeros} | {' | '.join(times)} | {farthest:.0e} |"
        )


if __name__ == "__main__":
    main()
