"""How long a round takes, and so how many tokens a second come out.

A round is memory read, plus arithmetic, plus what the GPUs tell each other, plus kernels that are
too small to fill a GPU, plus what the host does. Reading and arithmetic are added, not the larger
of the two taken: published rounds grow with their tokens long before they are bound by arithmetic.
The constants are those of `Constants`, fitted to published figures (docs/planning.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from dflash_trt.roofline.hardware import Gpu
from dflash_trt.roofline.shape import BF16 as PLAIN
from dflash_trt.roofline.shape import Format, Layer, Shape

# kernels of a layer that follow each other, by what is in it; of the head and what samples
ATTENTION_KERNELS, MLP_KERNELS, EXPERTS_KERNELS, HEAD_KERNELS = 6, 3, 6, 3
BF16 = 2  # bytes of an activation
Software = Literal["tensorrt_llm", "sglang"]


@dataclass(frozen=True)
class Constants:
    """What is not on a data sheet."""

    bandwidth: float  # share of the memory's bandwidth that is reached
    flops: float  # share of the dense FLOP/s that is reached
    expert_flops: float  # the same by experts, each of which has few of the tokens
    kernel: Mapping[Software, float]  # seconds of a small kernel and the gap behind it
    host: Mapping[Software, float]  # seconds a speculative round waits for the host
    all_reduce: float  # seconds of an all-reduce of a few bytes

    @staticmethod
    @cache
    def fitted() -> "Constants":
        return Constants(**_written()["constants"])


def fit_errors() -> dict[str, float]:
    """`median` and `nine_of_ten` of |ln(predicted / measured)| over `checked` figures."""
    return _written()["errors"]  # type: ignore[no-any-return]


def _written() -> dict[str, Any]:
    text = files(__package__).joinpath("constants.yaml").read_text("utf-8")
    return yaml.safe_load(text)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Layout:
    """How one instance of the target is spread over `gpus` GPUs of an NVLink domain."""

    gpus: int = 1
    attention_dp: bool = False  # attention is on every GPU whole, each with its own sequences
    experts_parallel: bool = False  # a GPU holds whole experts, else a slice of each

    def __str__(self) -> str:
        if self.gpus == 1:
            return "1 GPU"
        experts = f" EP{self.gpus}" if self.experts_parallel else ""
        return f"{'DP' if self.attention_dp else 'TP'}{self.gpus}{experts}"


@dataclass(frozen=True)
class Step:
    """Seconds of one pass of a model, by what they go to."""

    weights: float = 0.0
    cache: float = 0.0
    arithmetic: float = 0.0
    communication: float = 0.0
    kernels: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        parts = (self.weights, self.cache, self.arithmetic)
        return sum(parts) + self.communication + self.kernels + self.host

    def __add__(self, other: "Step") -> "Step":
        return Step(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def __rmul__(self, times: float) -> "Step":
        return Step(*(part * times for part in self.parts()))

    def parts(self) -> tuple[float, ...]:
        return (
            self.weights,
            self.cache,
            self.arithmetic,
            self.communication,
            self.kernels,
            self.host,
        )


@dataclass(frozen=True)
class Runtime:
    """Where a model runs."""

    gpu: Gpu
    layout: Layout
    constants: Constants
    software: Software = "tensorrt_llm"
    kv_bytes: float = 2  # of a number in the target's cache

    def read(self, size: float) -> float:
        """Seconds to read bytes of the GPU's memory."""
        return size / (self.gpu.bandwidth * self.constants.bandwidth)

    def multiply(self, multiply_adds: float, format: Format, share: float | None = None) -> float:
        """Seconds of arithmetic; a type that the GPU does not have is done in bf16."""
        flops = self.gpu.flops
        speed = {"fp4": flops.get("fp4"), "fp8": flops.get("fp8")}.get(format.multiplied)
        share = self.constants.flops if share is None else share
        return 2 * multiply_adds / ((speed or flops["bf16"]) * share)


def experts_read(layer: Layer, tokens: int, layout: Layout) -> float:
    """Experts that the busiest GPU reads, each as a whole one, for a batch of tokens.

    Tokens choose independently and evenly: e (1 - (1 - k/e)^n) are touched. With whole experts
    on a GPU the busiest one has about sqrt(2 ln g) deviations more than its share.
    """
    share = 1 - math.pow(1 - layer.chosen / layer.experts, tokens)  # of the experts
    mean = layer.experts * share / layout.gpus
    if not layout.experts_parallel or layout.gpus == 1:
        return mean
    worst = mean + math.sqrt(2 * math.log(layout.gpus) * mean * (1 - share))
    return min(max(worst, 1.0), layer.experts / layout.gpus)


def forward(
    shape: Shape, runtime: Runtime, rows: int, tokens: int, context: float, kv_bytes: float
) -> Step:
    """One pass over `rows` sequences of `context` tokens, `tokens` new ones in each; no head."""
    layout, constants = runtime.layout, runtime.constants
    split = 1 if layout.attention_dp else layout.gpus  # all but experts are whole with attention-DP
    own_rows = math.ceil(rows / layout.gpus) if layout.attention_dp else rows
    new, everything = own_rows * tokens, rows * tokens
    step = Step()
    for layer, count in shape.kinds.items():
        seen = context + tokens
        seen = min(seen, layer.window + tokens) if layer.window else seen
        cached = layer.cached * seen * kv_bytes + 2 * layer.state * BF16  # a state is written too
        weights = layer.attention * layer.attention_format.bytes / split
        weights += layer.mlp * layer.mlp_format.bytes / split
        work = runtime.multiply(new * layer.attention / split, layer.attention_format)
        work += runtime.multiply(new * layer.mlp / split, layer.mlp_format)
        # scores and values: each query meets each position twice
        work += runtime.multiply(new * 2 * layer.query * seen / split, PLAIN)
        kernels, exchanged = ATTENTION_KERNELS + MLP_KERNELS, 0.0
        if layer.experts:
            kernels = ATTENTION_KERNELS + EXPERTS_KERNELS
            read = experts_read(layer, everything, layout)
            weights += read * layer.expert * layer.expert_format.bytes
            work += runtime.multiply(
                everything * layer.chosen * layer.expert / layout.gpus,
                layer.expert_format,
                constants.expert_flops,
            )
        if not layout.attention_dp or layer.experts:
            exchanged = 2 * _exchange(runtime, everything * shape.hidden * BF16)
        step += count * Step(
            weights=runtime.read(weights),
            cache=runtime.read(own_rows * cached / min(split, layer.kv_heads)),
            arithmetic=work,
            communication=exchanged,
            kernels=kernels * constants.kernel[runtime.software],
        )
    return step + Step(weights=runtime.read(shape.other * BF16 / split))


def head(shape: Shape, runtime: Runtime, rows: int, tokens: int) -> Step:
    """The output head, split by its vocabulary, and the choice of tokens."""
    layout = runtime.layout
    split = 1 if layout.attention_dp else layout.gpus
    own_rows = math.ceil(rows / layout.gpus) if layout.attention_dp else rows
    return Step(
        weights=runtime.read(shape.head * BF16 / split),
        arithmetic=runtime.multiply(own_rows * tokens * shape.head / split, PLAIN),
        communication=_exchange(runtime, 0) if split > 1 else 0.0,
        kernels=HEAD_KERNELS * runtime.constants.kernel[runtime.software],
    )


def _exchange(runtime: Runtime, size: float) -> float:
    """Seconds of one all-reduce, or half of what brings tokens to their experts and back."""
    gpus = runtime.layout.gpus
    if gpus == 1:
        return 0.0
    moved = 2 * size * (gpus - 1) / gpus
    return runtime.constants.all_reduce + moved / runtime.gpu.link_bandwidth
