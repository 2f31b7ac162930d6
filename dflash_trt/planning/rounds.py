"""Model of the time of a round on a GPU, from sizes and data sheets.

A round is memory reads, plus arithmetic, communication, kernels too small to fill a GPU, and host
time. Reads and arithmetic are added instead of taking the larger: published rounds grow with their
tokens long before arithmetic bounds them. Constants are fitted to published figures
(docs/speculation.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Literal, NamedTuple

from dflash_trt.files import read_yaml_beside
from dflash_trt.hardware import Gpu
from dflash_trt.planning.model_size import BF16, Format, Layer, ModelSize
from dflash_trt.planning.published import published_acceptance

# sequential kernels of a layer's attention, MLP or experts; of the head and sampling
ATTENTION_KERNELS = 6
MLP_KERNELS = 3
EXPERTS_KERNELS = 6
HEAD_KERNELS = 3
ACTIVATION_BYTES = 2
DRAFT_RATE = 0.8  # fraction of drafts accepted, if nothing is published for a drafter
Software = Literal["tensorrt_llm", "sglang", "pytorch"]  # the last is our engine kind


@dataclass(frozen=True)
class Constants:
    """What data sheets lack, fitted to published figures."""

    bandwidth: float  # fraction of the memory bandwidth reached
    flops: float  # fraction of the dense FLOP/s reached
    expert_flops: float  # likewise for experts, which see few tokens
    kernel: Mapping[Software, float]  # seconds of a small kernel and the gap after it
    host: Mapping[Software, float]  # seconds a speculative round waits for the host
    all_reduce: float  # seconds of an all-reduce of a few bytes
    one_shot: float  # fraction of NVLink reached, where each GPU sends all it has to all others
    two_shots: float  # seconds of a large all-reduce, which goes in two steps, besides sending

    @staticmethod
    @cache
    def fitted() -> "Constants":
        return Constants(**read_yaml_beside(__file__, "constants.yaml")["constants"])


def fit_errors() -> dict[str, float]:
    """Return `median` and `nine_of_ten` of |ln(predicted / measured)| over `checked` figures."""
    return dict(read_yaml_beside(__file__, "constants.yaml")["errors"])


@dataclass(frozen=True)
class Layout:
    """The distribution of one target instance over `gpus` GPUs of an NVLink domain."""

    gpus: int = 1
    attention_dp: bool = False  # attention is whole on every GPU, for its own sequences
    experts_parallel: bool = False  # a GPU holds whole experts, otherwise a slice of each

    def __str__(self) -> str:
        if self.gpus == 1:
            return "1 GPU"
        attention = "DP" if self.attention_dp else "TP"
        experts = f" EP{self.gpus}" if self.experts_parallel else ""
        return f"{attention}{self.gpus}{experts}"

    @property
    def split(self) -> int:
        """GPUs that divide everything but experts."""
        return 1 if self.attention_dp else self.gpus

    def sequences_per_gpu(self, sequences: int) -> int:
        return math.ceil(sequences / self.gpus) if self.attention_dp else sequences


@dataclass(frozen=True)
class Step:
    """Seconds of one pass of a model, by cause."""

    weights: float = 0.0
    cache: float = 0.0
    arithmetic: float = 0.0
    communication: float = 0.0
    kernels: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return float(sum(vars(self).values()))

    def plus(self, other: "Step", times: int = 1) -> "Step":
        added = vars(other)
        return Step(**{name: part + times * added[name] for name, part in vars(self).items()})


@dataclass(frozen=True)
class Runtime:
    gpu: Gpu
    layout: Layout
    constants: Constants
    software: Software = "tensorrt_llm"
    kv_bytes: float = 2  # per number in the target's cache

    def read(self, size: float) -> float:
        """Return the seconds to read bytes of GPU memory."""
        return size / (self.gpu.bandwidth * self.constants.bandwidth)

    def multiply(self, multiply_adds: float, format: Format, share: float | None = None) -> float:
        """Return the seconds of arithmetic; types that the GPU lacks run in bf16."""
        flops = self.gpu.flops
        speed = {"fp4": flops.fp4, "fp8": flops.fp8}.get(format.multiplied) or flops.bf16
        return 2 * multiply_adds / (speed * (share or self.constants.flops))

    def exchange(self, size: float) -> float:
        """Return the seconds of an all-reduce, or half of an exchange of tokens between experts."""
        gpus = self.layout.gpus
        if gpus == 1:
            return 0.0
        link = self.gpu.link_bandwidth
        constants = self.constants
        sent = size * (gpus - 1)
        one_shot = constants.all_reduce + sent / (link * constants.one_shot)
        return min(one_shot, constants.two_shots + 2 * sent / gpus / link)


@dataclass(frozen=True)
class Method:
    name: Literal["plain", "DFlash"]
    draft_tokens: int = 0
    acceptance: float = 1.0  # tokens committed per round, including the target's own
    drafter: ModelSize | None = None
    block: int = 0  # tokens that the drafter fills, however few are verified

    def shortened(self, draft_tokens: int) -> "Method":
        """Return the method with fewer drafts, assuming equal acceptance of each draft."""
        tau = convert_acceptance(self.acceptance, self.draft_tokens, draft_tokens)
        return replace(self, draft_tokens=draft_tokens, acceptance=tau)


PLAIN = Method("plain")


class PlannedRound(NamedTuple):
    method: Method
    step: Step

    @property
    def rate(self) -> float:
        """Tokens per second of a sequence."""
        return self.method.acceptance / self.step.seconds


def dflash(drafter: ModelSize, acceptance: float, draft_tokens: int) -> Method:
    return Method("DFlash", draft_tokens, acceptance, drafter, draft_tokens + 1)


def draft_rate(acceptance: float, draft_tokens: int) -> float:
    """Return the acceptance rate p of a draft: sum of p^i, i = 0 .. n, is tau."""
    low = 0.0
    high = 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if _tokens_of_a_round(middle, draft_tokens) < acceptance:
            low = middle
        else:
            high = middle
    return high


def _tokens_of_a_round(rate: float, draft_tokens: int) -> float:
    return sum(rate**i for i in range(draft_tokens + 1))


def convert_acceptance(acceptance: float, drafts: int, to: int) -> float:
    if to == drafts:
        return acceptance
    return _tokens_of_a_round(draft_rate(acceptance, drafts), to)


def expected_acceptance(drafter: str, draft_tokens: int) -> tuple[float, str]:
    """Return the expected tokens per round, and their source; drafter: its Hub id."""
    table = published_acceptance(drafter)
    if table is None:
        tau = _tokens_of_a_round(DRAFT_RATE, draft_tokens)
        return tau, f"taken: {DRAFT_RATE:.0%} of drafts accepted"
    tau = convert_acceptance(mean(table.tau.values()), table.draft_tokens, draft_tokens)
    tasks = len(table.tau)
    return tau, f"published ({table.source}), mean of {tasks} task{'s' * (tasks > 1)}"


def fastest(
    target: ModelSize, method: Method, runtime: Runtime, sequences: int, context: float
) -> PlannedRound:
    """Return the method with the fastest number of drafts, from 1 to its own, and its round."""
    # TensorRT-LLM's `draft_len_schedule` can use fewer drafts than a block has
    choices = [method.shortened(drafts) for drafts in range(1, method.draft_tokens + 1)]
    rounds = [
        PlannedRound(choice, round_time(target, choice, runtime, sequences, context))
        for choice in choices or [method]
    ]
    return max(rounds, key=lambda candidate: candidate.rate)


def round_time(
    target: ModelSize, method: Method, runtime: Runtime, sequences: int, context: float
) -> Step:
    """Return the seconds of a round of `sequences` of one instance, `context` tokens each."""
    tokens = method.draft_tokens + 1
    step = _forward(target, runtime, sequences, tokens, context, runtime.kv_bytes)
    step = step.plus(_head(target, runtime, sequences, tokens))
    if method.drafter is None or not method.draft_tokens:
        return step
    step = step.plus(Step(host=runtime.constants.host[runtime.software]))
    # a pass over the whole block, and the target's head
    fill = _forward(method.drafter, runtime, sequences, method.block, context, ACTIVATION_BYTES)
    return step.plus(fill).plus(_head(target, runtime, sequences, method.block - 1))


def experts_read(layer: Layer, tokens: int, layout: Layout) -> float:
    """Return the number of experts that the busiest GPU reads for a batch of tokens.

    Tokens choose independently and evenly: e (1 - (1 - k/e)^n) experts are used. With whole experts
    on a GPU the busiest one has about sqrt(2 ln g) deviations more than its share.
    """
    share = 1 - math.pow(1 - layer.chosen / layer.experts, tokens)  # of the experts
    mean = layer.experts * share / layout.gpus
    if not layout.experts_parallel or layout.gpus == 1:
        return mean
    worst = mean + math.sqrt(2 * math.log(layout.gpus) * mean * (1 - share))
    return min(max(worst, 1.0), layer.experts / layout.gpus)


def _forward(
    model: ModelSize, runtime: Runtime, sequences: int, tokens: int, context: float, kv_bytes: float
) -> Step:
    """Return one pass over `sequences` of `context` tokens, `tokens` new each; no head."""
    layout = runtime.layout
    constants = runtime.constants
    split = layout.split
    sequences_per_gpu = layout.sequences_per_gpu(sequences)
    new = sequences_per_gpu * tokens
    everything = sequences * tokens
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
        kernels = ATTENTION_KERNELS + MLP_KERNELS
        exchanged = 0.0
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
        one_layer = Step(
            weights=runtime.read(weights),
            cache=runtime.read(sequences_per_gpu * cached / min(split, layer.kv_heads)),
            arithmetic=work,
            communication=exchanged,
            kernels=kernels * constants.kernel[runtime.software],
        )
        step = step.plus(one_layer, count)
    return step.plus(Step(weights=runtime.read(model.other * ACTIVATION_BYTES / split)))


def _head(model: ModelSize, runtime: Runtime, sequences: int, tokens: int) -> Step:
    # divided by vocabulary; sampling included
    split = runtime.layout.split
    sequences_per_gpu = runtime.layout.sequences_per_gpu(sequences)
    return Step(
        weights=runtime.read(model.head_size * ACTIVATION_BYTES / split),
        arithmetic=runtime.multiply(sequences_per_gpu * tokens * model.head_size / split, BF16),
        communication=runtime.exchange(0) if split > 1 else 0.0,
        kernels=HEAD_KERNELS * runtime.constants.kernel[runtime.software],
    )
