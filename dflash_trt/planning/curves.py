"""Layouts that a machine allows, what fits, and the speed of each method."""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_trt.planning.hardware import Machine
from dflash_trt.planning.memory import Memory, fit_memory
from dflash_trt.planning.model_size import ModelSize
from dflash_trt.planning.rounds import Constants, Layout, Method, Runtime, Step, fastest

MAX_CONCURRENCY = 16384  # largest number of sequences considered


@dataclass(frozen=True)
class Deployment:
    """The subject of a plan."""

    machine: Machine
    gpus: int
    target: ModelSize
    drafter: ModelSize
    block: int  # most tokens of a round
    kv_bytes: float = 2
    paged: bool = True  # the drafter's context is in the KV cache's pool

    def fit(self, layout: Layout, context: int) -> Memory:
        return fit_memory(
            self.machine.gpu,
            layout,
            self.target,
            self.drafter,
            context=context,
            block=self.block,
            kv_bytes=self.kv_bytes,
            paged=self.paged,
        )

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts of one instance; the GPUs hold as many instances as fit."""
        experts = any(layer.experts for layer in self.target.layers)
        gpus = 1
        while gpus <= min(self.gpus, self.machine.domain):
            if self.gpus % gpus == 0:
                yield Layout(gpus)
                if experts and gpus > 1:
                    yield Layout(gpus, experts_parallel=True)
                    yield Layout(gpus, attention_dp=True, experts_parallel=True)
            gpus *= 2


@dataclass(frozen=True)
class Point:
    """A method at its best for a number of sequences on the whole machine."""

    method: Method
    concurrency: int
    layout: Layout
    per_user: float  # tokens/s per sequence
    per_gpu: float  # tokens/s per GPU
    step: Step


def curve(
    deployment: Deployment, method: Method, context: int, constants: Constants
) -> list[Point]:
    """Return the best layout and draft length for 1, 2, 4, .. sequences, while they fit."""
    gpus, gpu = deployment.gpus, deployment.machine.gpu
    room = {layout: deployment.fit(layout, context).sequences for layout in deployment.layouts()}
    points: list[Point] = []
    concurrency = 1
    while concurrency <= MAX_CONCURRENCY:
        found = []
        for layout, sequences in room.items():
            rows = -(-concurrency * layout.gpus // gpus)  # of the fullest instance
            if rows <= sequences:
                runtime = Runtime(gpu, layout, constants, kv_bytes=deployment.kv_bytes)
                choice, step = fastest(deployment.target, method, runtime, rows, context)
                rate = choice.acceptance / step.seconds
                found.append(
                    Point(choice, concurrency, layout, rate, rate * concurrency / gpus, step)
                )
        if not found:
            break
        points.append(max(found, key=lambda point: point.per_user))
        concurrency *= 2
    return points
