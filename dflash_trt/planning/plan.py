"""The plan: every layout that a machine allows, what fits into it, and how fast each method is."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dflash_trt.planning.memory import Memory, fit
from dflash_trt.roofline.hardware import Machine
from dflash_trt.roofline.methods import Method, round_time
from dflash_trt.roofline.passes import Constants, Layout, Runtime, Step
from dflash_trt.roofline.shape import Shape

MOST = 16384  # sequences that are looked at


@dataclass(frozen=True)
class Deployment:
    """What is planned for."""

    machine: Machine
    gpus: int
    target: Shape
    drafter: Shape
    block: int  # tokens of a round at most
    kv_bytes: float = 2
    paged: bool = True  # the drafter's context is in the KV cache's pool

    def fit(self, layout: Layout, context: int) -> Memory:
        return fit(
            self.machine.gpu,
            layout,
            self.target,
            self.drafter,
            context=context,
            block=self.block,
            kv_bytes=self.kv_bytes,
            paged=self.paged,
        )


@dataclass(frozen=True)
class Point:
    """A method at its best for so many sequences on the whole machine."""

    method: str
    concurrency: int
    layout: Layout
    draft_tokens: int
    acceptance: float
    per_user: float  # tokens/s of each sequence
    per_gpu: float  # tokens/s of each GPU
    step: Step


def layouts(deployment: Deployment) -> Iterator[Layout]:
    """Of one instance; the machine has as many as it has GPUs for."""
    experts = any(layer.experts for layer in deployment.target.layers)
    gpus = 1
    while gpus <= min(deployment.gpus, deployment.machine.domain):
        if deployment.gpus % gpus == 0:
            yield Layout(gpus)
            if experts and gpus > 1:
                yield Layout(gpus, experts_parallel=True)
                yield Layout(gpus, attention_dp=True, experts_parallel=True)
        gpus *= 2


def curve(
    deployment: Deployment, method: Method, context: int, constants: Constants
) -> list[Point]:
    """The best layout and draft length for 1, 2, 4, .. sequences, as long as they fit."""
    room = {layout: deployment.fit(layout, context).sequences for layout in layouts(deployment)}
    points, concurrency = [], 1
    while concurrency <= MOST:
        found = [
            _point(deployment, choice, layout, concurrency, context, constants)
            for layout, sequences in room.items()
            if _rows(deployment, layout, concurrency) <= sequences
            for choice in _choices(method)
        ]
        if not found:
            break
        points.append(max(found, key=lambda point: point.per_user))
        concurrency *= 2
    return points


def _choices(method: Method) -> Sequence[Method]:
    """A drafter may be asked for fewer drafts, as `draft_len_schedule` does."""
    if method.drafter is None:
        return [method]
    return [method.shortened(drafts) for drafts in range(1, method.draft_tokens + 1)]


def _rows(deployment: Deployment, layout: Layout, concurrency: int) -> int:
    """Sequences of the fullest instance."""
    return -(-concurrency * layout.gpus // deployment.gpus)


def _point(
    deployment: Deployment,
    method: Method,
    layout: Layout,
    concurrency: int,
    context: int,
    constants: Constants,
) -> Point:
    runtime = Runtime(deployment.machine.gpu, layout, constants, kv_bytes=deployment.kv_bytes)
    rows = _rows(deployment, layout, concurrency)
    step = round_time(deployment.target, method, runtime, rows, context)
    per_user = method.acceptance / step.seconds
    return Point(
        method=method.name,
        concurrency=concurrency,
        layout=layout,
        draft_tokens=method.draft_tokens,
        acceptance=method.acceptance,
        per_user=per_user,
        per_gpu=per_user * concurrency / deployment.gpus,
        step=step,
    )


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats both for the user and for the GPU, slowest user first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.per_user, -p.per_gpu)):
        if not kept or point.per_gpu > kept[-1].per_gpu:
            kept.append(point)
    return kept[::-1]


def per_gpu_at(points: Sequence[Point], per_user: float) -> float | None:
    """tokens/s of a GPU where each user gets `per_user`, along the front; None where it ends."""
    for slow, fast in pairwise(front(points)):
        if slow.per_user <= per_user <= fast.per_user:
            share = (per_user - slow.per_user) / (fast.per_user - slow.per_user)
            return math.exp((1 - share) * math.log(slow.per_gpu) + share * math.log(fast.per_gpu))
    return None
