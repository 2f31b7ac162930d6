"""How long a round takes on a GPU, by arithmetic over sizes and data sheets.

A round is memory read, plus arithmetic, plus what the GPUs tell each other, plus kernels that are
too small to fill a GPU, plus what the host does. Reading and arithmetic are added, not the larger
of the two taken: published rounds grow with their tokens long before they are bound by arithmetic.
The constants are fitted to published figures (docs/speculation.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any, Literal

from dflash_trt.files import data_file
from dflash_trt.planning.hardware import Gpu
from dflash_trt.planning.model_size import BF16, Format, Layer, ModelSize, eagle_size
from dflash_trt.planning.published import Acceptance, eagle_acceptance, published_acceptance

# kernels in sequence: of a layer's attention, MLP or experts; of the head and sampling
ATTENTION_KERNELS, MLP_KERNELS, EXPERTS_KERNELS, HEAD_KERNELS = 6, 3, 6, 3
ACTIVATION_BYTES = 2
EAGLE_CHAIN = 3  # draft tokens of an EAGLE-3 chain, TensorRT-LLM's usual max_draft_len
EAGLE_ACCEPTANCE = 2.8943  # gpt-oss-120b's, where nothing is published for a target
DRAFT_RATE = 0.8  # share of drafts that are accepted, where nothing is published for a drafter
Software = Literal["tensorrt_llm", "sglang"]


@dataclass(frozen=True)
class Constants:
    """What no data sheet says; fitted to published figures."""

    bandwidth: float  # share of the memory's bandwidth that is reached
    flops: float  # share of the dense FLOP/s that is reached
    expert_flops: float  # the same for experts, each of which sees few tokens
    kernel: Mapping[Software, float]  # seconds of a small kernel and the gap after it
    host: Mapping[Software, float]  # seconds a speculative round waits for the host
    all_reduce: float  # seconds of an all-reduce of a few bytes

    @staticmethod
    @cache
    def fitted() -> "Constants":
        return Constants(**_written()["constants"])


def fit_errors() -> dict[str, float]:
    """`median` and `nine_of_ten` of |ln(predicted / measured)| over `checked` figures."""
    return dict(_written()["errors"])


def _written() -> dict[str, Any]:
    return dict(data_file(__file__, "constants.yaml"))


@dataclass(frozen=True)
class Layout:
    """How one instance of the target is spread over `gpus` GPUs of an NVLink domain."""

    gpus: int = 1
    attention_dp: bool = False  # attention is on every GPU whole, each with its own sequences
    experts_parallel: bool = False  # a GPU holds whole experts, otherwise a slice of each

    def __str__(self) -> str:
        if self.gpus == 1:
            return "1 GPU"
        experts = f" EP{self.gpus}" if self.experts_parallel else ""
        return f"{'DP' if self.attention_dp else 'TP'}{self.gpus}{experts}"

    @property
    def split(self) -> int:
        """How many GPUs share what is no expert."""
        return 1 if self.attention_dp else self.gpus

    def own_rows(self, rows: int) -> int:
        """Sequences of each GPU."""
        return math.ceil(rows / self.gpus) if self.attention_dp else rows


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
        return sum(self.parts())

    def __add__(self, other: "Step") -> "Step":
        return Step(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def __rmul__(self, times: float) -> "Step":
        return Step(*(times * part for part in self.parts()))

    def parts(self) -> tuple[float, ...]:
        return tuple(vars(self).values())


@dataclass(frozen=True)
class Runtime:
    """Where a model runs."""

    gpu: Gpu
    layout: Layout
    constants: Constants
    software: Software = "tensorrt_llm"
    kv_bytes: float = 2  # per number in the target's cache

    def read(self, size: float) -> float:
        """Seconds to read bytes of the GPU's memory."""
        return size / (self.gpu.bandwidth * self.constants.bandwidth)

    def multiply(self, multiply_adds: float, format: Format, share: float | None = None) -> float:
        """Seconds of arithmetic; a type that the GPU does not have is done in bf16."""
        flops = self.gpu.flops
        speed = {"fp4": flops.fp4, "fp8": flops.fp8}.get(format.multiplied) or flops.bf16
        return 2 * multiply_adds / (speed * (share or self.constants.flops))

    def exchange(self, size: float) -> float:
        """Seconds of one all-reduce, or half of what brings tokens to their experts and back."""
        gpus = self.layout.gpus
        if gpus == 1:
            return 0.0
        moved = 2 * size * (gpus - 1) / gpus
        return self.constants.all_reduce + moved / self.gpu.link_bandwidth


@dataclass(frozen=True)
class Method:
    """How to draft.

    acceptance: tokens that a round commits with `draft_tokens` drafts, the target's own included.
    block: tokens that a DFlash drafter fills, however few of them are verified.
    """

    name: Literal["plain", "EAGLE-3", "DFlash"]
    draft_tokens: int = 0
    acceptance: float = 1.0
    drafter: ModelSize | None = None
    block: int = 0

    def shortened(self, draft_tokens: int) -> "Method":
        """The same with fewer drafts. Each draft is taken to be accepted as often as the others."""
        if draft_tokens == self.draft_tokens:
            return self
        rate = draft_rate(self.acceptance, self.draft_tokens)
        return replace(
            self, draft_tokens=draft_tokens, acceptance=_tokens_of_a_round(rate, draft_tokens)
        )


PLAIN = Method("plain")


def eagle(target: ModelSize, acceptance: float, draft_tokens: int = EAGLE_CHAIN) -> Method:
    return Method("EAGLE-3", draft_tokens, acceptance, eagle_size(target))


def dflash(drafter: ModelSize, acceptance: float, draft_tokens: int) -> Method:
    return Method("DFlash", draft_tokens, acceptance, drafter, draft_tokens + 1)


def draft_rate(acceptance: float, draft_tokens: int) -> float:
    """How often a draft is accepted whose predecessors were: sum of p^i, i = 0 .. n, is tau."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if _tokens_of_a_round(middle, draft_tokens) < acceptance:
            low = middle
        else:
            high = middle
    return high


def _tokens_of_a_round(rate: float, draft_tokens: int) -> float:
    return sum(rate**i for i in range(draft_tokens + 1))


def expected_acceptance(drafter: str, draft_tokens: int) -> tuple[float, str]:
    """The tokens of a round with so many drafts, and where that is from; drafter: its Hub id."""
    if (table := published_acceptance(drafter)) is not None:
        return _published(table, draft_tokens)
    tokens = _tokens_of_a_round(DRAFT_RATE, draft_tokens)
    return tokens, f"taken: {DRAFT_RATE:.0%} of drafts accepted"


def expected_eagle(target: str) -> tuple[float, str]:
    """The same of an EAGLE-3 chain; target: its Hub id."""
    if (table := eagle_acceptance(target)) is not None:
        return _published(table, EAGLE_CHAIN)
    return EAGLE_ACCEPTANCE, "nothing published for this target: gpt-oss-120b's"


def _published(table: Acceptance, draft_tokens: int) -> tuple[float, str]:
    """By the rate of each draft: fewer drafts may be planned than were measured."""
    tau = mean(table.tau.values())
    if draft_tokens != table.draft_tokens:
        tau = _tokens_of_a_round(draft_rate(tau, table.draft_tokens), draft_tokens)
    tasks = len(table.tau)
    return tau, f"published ({table.source}), mean of {tasks} task{'s' * (tasks > 1)}"


def fastest(
    target: ModelSize, method: Method, runtime: Runtime, rows: int, context: float
) -> tuple[Method, Step]:
    """The method with the number of drafts, from 1 to its own, that is fastest, and its round.

    TensorRT-LLM's `draft_len_schedule` asks a drafter for fewer drafts than its block has.
    """
    choices = [method.shortened(drafts) for drafts in range(1, method.draft_tokens + 1)]
    rounds = [
        (choice, round_time(target, choice, runtime, rows, context))
        for choice in choices or [method]
    ]
    return max(rounds, key=lambda one: one[0].acceptance / one[1].seconds)


def round_time(
    target: ModelSize, method: Method, runtime: Runtime, rows: int, context: float
) -> Step:
    """Seconds of a round of `rows` sequences of one instance, `context` tokens long each."""
    tokens = method.draft_tokens + 1
    step = _forward(target, runtime, rows, tokens, context, runtime.kv_bytes)
    step += _head(target, runtime, rows, tokens)
    if method.drafter is None or not method.draft_tokens:
        return step
    step += Step(host=runtime.constants.host[runtime.software])
    if method.name == "DFlash":  # a pass over the whole block, and the target's head
        step += _forward(method.drafter, runtime, rows, method.block, context, ACTIVATION_BYTES)
        return step + _head(target, runtime, rows, method.block - 1)
    each = _forward(method.drafter, runtime, rows, 1, context, ACTIVATION_BYTES)
    return step + method.draft_tokens * (each + _head(method.drafter, runtime, rows, 1))


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


def _forward(
    model: ModelSize, runtime: Runtime, rows: int, tokens: int, context: float, kv_bytes: float
) -> Step:
    """One pass over `rows` sequences of `context` tokens, `tokens` new ones in each; no head."""
    layout, constants = runtime.layout, runtime.constants
    split, own_rows = layout.split, layout.own_rows(rows)
    new, everything = own_rows * tokens, rows * tokens
    step = Step()
    for layer, count in model.kinds.items():
        seen = context + tokens
        if layer.window:
            seen = min(seen, layer.window + tokens)
        # a state is written too
        cached = layer.cached * seen * kv_bytes + 2 * layer.state * ACTIVATION_BYTES
        weights = layer.attention * layer.attention_format.bytes / split
        weights += layer.mlp * layer.mlp_format.bytes / split
        work = runtime.multiply(new * layer.attention / split, layer.attention_format)
        work += runtime.multiply(new * layer.mlp / split, layer.mlp_format)
        # scores and values: each query meets each position twice
        work += runtime.multiply(new * 2 * layer.query * seen / split, BF16)
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
            exchanged = 2 * runtime.exchange(everything * model.hidden * ACTIVATION_BYTES)
        step += count * Step(
            weights=runtime.read(weights),
            cache=runtime.read(own_rows * cached / min(split, layer.kv_heads)),
            arithmetic=work,
            communication=exchanged,
            kernels=kernels * constants.kernel[runtime.software],
        )
    return step + Step(weights=runtime.read(model.other * ACTIVATION_BYTES / split))


def _head(model: ModelSize, runtime: Runtime, rows: int, tokens: int) -> Step:
    """The output head, split by its vocabulary, and the choice of tokens."""
    split, own_rows = runtime.layout.split, runtime.layout.own_rows(rows)
    return Step(
        weights=runtime.read(model.head * ACTIVATION_BYTES / split),
        arithmetic=runtime.multiply(own_rows * tokens * model.head / split, BF16),
        communication=runtime.exchange(0) if split > 1 else 0.0,
        kernels=HEAD_KERNELS * runtime.constants.kernel[runtime.software],
    )
