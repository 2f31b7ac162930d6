"""Time steps and rounds of a pair with random weights: `python tests/gpu/sizes.py FOLDER RESULTS`.

The pair has Qwen3-8B's and its drafter's sizes. Its checkpoints are sparse files, and the weights
are drawn on the GPU: what a step costs does not depend on them. Each time stands beside its floor:
the bytes that the step has to read, at the speed of a large copy on the same GPU.
"""

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.builder.engines import EngineOptions
from dflash_trt.checkpoints import load_drafter, load_target
from dflash_trt.decoding import Request, Scheduler, in_process
from dflash_trt.decoding.proposer import Proposer
from dflash_trt.engines import load_engine, read_info, write_info
from dflash_trt.engines.pytorch.engine import Engine
from dflash_trt.speculation import Fixed
from tests.gpu.sparse import Sizes, write_sparse_pair
from tests.support.builds import write_engines

QWEN3_8B = Sizes(
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    wide=12288,
    vocab=151936,
    block=16,
    taps=(1, 9, 17, 25, 33),
    draft_layers=5,
    longest=16640,
)
STREAMS, VISIBLE, WIDTHS = (1, 8, 32), (512, 4096, 16384), (1, 2, 4, 8, 16)
PROMPTS = (512, 4096)
COPIED = 1 << 30  # bytes of the copy that is timed
SPARE = 12 << 30  # bytes of GPU memory for prompts and graphs


@dataclass(frozen=True)
class Measured:
    what: str  # "step", "draft", "prompt" or "round"
    streams: int
    width: int
    visible: int
    milliseconds: float  # the median
    floor: float | None = None  # milliseconds


def median_ms(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median of runs after the first three, which compile and record."""
    times = []
    for _ in range(3 + repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[3:])


def copy_speed(device: str, size: int = COPIED) -> float:
    """Return bytes per second that a copy reads and writes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * size / median_ms(copy) * 1e3


def load_random(directory: Path) -> Engine:
    """Load an engine and draw its weights: norms near 1, matrices that keep numbers small."""
    engine = load_engine(directory)
    assert isinstance(engine, Engine)
    for name, weight in engine._program.weights.items():
        if "norm" in name:
            weight.fill_(1)
        elif weight.dim() == 2 and not name.startswith("rope"):
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return engine


def read_bytes(engine: Engine, streams: int, visible: int) -> int:
    """Return what a step reads: its matrices but the embedding, and keys and values."""
    tables = ("embed_tokens.weight", "rope")
    matrices = [
        weight.nbytes
        for name, weight in engine._program.weights.items()
        if weight.dim() == 2 and not any(table in name for table in tables)
    ]
    return sum(matrices) + streams * visible * engine.info.token_bytes


def step_ms(engine: Engine, streams: int, width: int, visible: int, context: int = 0) -> float:
    place, scored = visible - width - context, streams * width
    if width > engine.info.most_verified:
        scored = 1  # of a prompt's chunk
    step = engine.step(0, streams, width, visible, scored, context)
    for name, array in step.inputs.items():
        if name in ("tokens", "block"):
            array[:] = np.arange(array.size).reshape(array.shape) % engine.info.vocab_size
        elif name == "features":
            array[:] = 0
    step.inputs["positions"][:] = place + np.arange(context + width)
    step.inputs["write_index"][:] = place
    step.inputs["mask"][:] = np.tri(width, visible, visible - width, dtype=bool)
    step.inputs["scored_tokens"][:] = np.arange(scored)
    return median_ms(step.run)


def measured_steps(
    target: Engine,
    drafter: Engine,
    speed: float,
    streams: Sequence[int],
    visible: Sequence[int],
    prompts: Sequence[int],
) -> Iterator[Measured]:
    block = target.info.block_size
    for count in streams:
        if count > target.info.slots:
            continue
        for seen in visible:
            every = WIDTHS if (count, seen) == (streams[0], visible[0]) else (1, block)
            for width in every:
                floor = 1e3 * read_bytes(target, count, seen) / speed
                took = step_ms(target, count, width, seen)
                yield Measured("step", count, width, seen, took, floor)
            floor = 1e3 * read_bytes(drafter, count, seen) / speed
            took = step_ms(drafter, count, block, seen, context=block)
            yield Measured("draft", count, block, seen, took, floor)
    for length in prompts:
        yield Measured("prompt", 1, length, length, step_ms(target, 1, length, length))


def round_ms(target: Engine, drafter: Engine, streams: int, rounds: int = 24) -> float:
    """Return the milliseconds of whole rounds, the host's part included."""
    block, vocab = target.info.block_size, target.info.vocab_size
    scheduler = Scheduler(
        in_process(target, drafter),
        slots=streams,
        max_seq_len=target.info.max_seq_len,
        prefill_chunk=256,
        policy=Fixed(block - 1),
        proposer=Proposer(),
    )
    for row in range(streams):
        prompt = [(7 * i * i + row) % (vocab - 2) for i in range(32)]
        scheduler.submit(Request(prompt, (rounds + 2 * streams + 8) * block))
    # prompts and rounds take turns; then rounds of all are compiled and recorded
    for _ in range(2 * streams + 4):
        scheduler.step()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def slots_that_fit(engines: Path, device: str) -> int:
    """Return how many slots of both models the GPU has room for beside the weights."""
    infos = [read_info(engines / role) for role in ("target", "drafter")]
    if device == "cpu":
        return infos[0].slots
    free, _ = torch.cuda.mem_get_info()
    files = [engines / role / "model.onnx.data" for role in ("target", "drafter")]
    room = free - SPARE - sum(file.stat().st_size for file in files)
    return min(infos[0].slots, room // sum(info.token_bytes * info.cache_len for info in infos))


def main(
    folder: Path,
    results: Path,
    sizes: Sizes = QWEN3_8B,
    streams: Sequence[int] = STREAMS,
    visible: Sequence[int] = VISIBLE,
    prompts: Sequence[int] = PROMPTS,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    write_sparse_pair(folder, sizes)
    start = time.perf_counter()
    target, drafter = load_target(folder / "target"), load_drafter(folder / "drafter")
    options = EngineOptions(
        slots=max(streams), max_seq_len=sizes.longest, kind="pytorch", dtype="bfloat16"
    )
    engines = folder / "engines"
    write_engines(target, drafter, engines, options)
    found: dict[str, Any] = {"device": device, "build seconds": time.perf_counter() - start}
    slots = slots_that_fit(engines, device)
    for role in ("target", "drafter"):
        write_info(engines / role, replace(read_info(engines / role), slots=slots))
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    speed = copy_speed(device, COPIED if device == "cuda" else 1 << 20)
    start = time.perf_counter()
    pair = [load_random(engines / role) for role in ("target", "drafter")]
    found |= {"load seconds": time.perf_counter() - start, "slots": slots}
    found |= {"copied GB/s": speed / 1e9, "measured": []}
    for measured in measure(pair, speed, slots, sizes.block, streams, visible, prompts):
        found["measured"].append(asdict(measured))
        if device == "cuda":
            found["memory GB"] = torch.cuda.max_memory_allocated() / 1e9
        results.write_text(json.dumps(found, indent=1))  # if the time is up before the next


def measure(
    pair: Sequence[Engine],
    speed: float,
    slots: int,
    block: int,
    streams: Sequence[int],
    visible: Sequence[int],
    prompts: Sequence[int],
) -> Iterator[Measured]:
    target, drafter = pair
    yield from measured_steps(target, drafter, speed, streams, visible, prompts)
    for count in streams:
        if count <= slots:
            yield Measured("round", count, block, 0, round_ms(target, drafter, count))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
