"""Compilation of a graph to a plan: cast to 16 bits, parse, check, build."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

import onnx_ir as ir

from dflash_trt.checkpoints import Report
from dflash_trt.config import Capability, TensorRT
from dflash_trt.engines.info import (
    ENGINE_FILE,
    MAX_BUFFERED,
    EngineInfo,
    PlanInfo,
    Shape,
    read_info,
    write_info,
)
from dflash_trt.engines.onnxruntime import GRAPH_FILE
from dflash_trt.engines.tensorrt import PLAN_FILE
from dflash_trt.engines.tensorrt.library import compute_capabilities, make_log, trt, use
from dflash_trt.engines.tensorrt.network import (
    check_form,
    check_network,
    parse,
    read_operators,
    to_16_bits,
)
from dflash_trt.errors import EngineError
from dflash_trt.graphs import WEIGHTS_FILE

DTYPES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}
CAPABILITIES: tuple[str, ...] = get_args(Capability)
USUAL_CONTEXT = 1024  # KV entries that a step is tuned for

Profile = dict[str, tuple[int, int, int]]


def compile_graphs(engines: Path, engine: TensorRT, prefill_chunk: int, report: Report) -> None:
    """Turn the graphs of a build into plans."""
    directories = sorted(file.parent for file in engines.rglob(ENGINE_FILE))
    for done, directory in enumerate(directories):
        report("building the plans", done, len(directories))
        build_plan(directory, engine, prefill_chunk)
    report("building the plans", len(directories), len(directories))


def build_plan(directory: Path, engine: TensorRT, prefill_chunk: int) -> None:
    """Turn an engine directory of kind onnxruntime into one of kind tensorrt.

    Deletes the graph's files: the plan includes the weights. prefill_chunk: the most tokens of a
    sequence in one step. Raises EngineError if the library, a required GPU or part of the graph is
    missing.
    """
    targets = capabilities(engine)
    info, path = read_info(directory), directory / GRAPH_FILE
    model = read_operators(path)
    check_form(model.graph)
    to_16_bits(model.graph, DTYPES[engine.dtype])
    log, messages = make_log()
    builder = trt.Builder(log)
    network = parse(builder, log, model, path)
    plan = describe(path, model.graph, info, engine, targets, prefill_chunk)
    plan = replace(plan, taken_apart=tuple(check_network(network, model.graph)))
    config = builder.create_builder_config()
    if engine.library == "tensorrt_rtx":
        config.num_compute_capabilities = len(targets)
        for index, name in enumerate(targets):
            target = getattr(trt.ComputeCapability, f"SM{name.replace('.', '')}")
            config.set_compute_capability(target, index)
    for sizes in plan.profiles:
        config.add_optimization_profile(_profile(builder, network, plan, sizes))
    timings = timing_cache(plan) if engine.library == "tensorrt" else None  # rtx has none
    if timings is not None:
        stored = timings.read_bytes() if timings.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(stored), False)
    with (directory / PLAN_FILE).open("wb") as file:
        if not builder.build_serialized_network_to_stream(network, config, _writer(file)):
            raise EngineError(
                f"{engine.library} {trt.__version__} cannot build the {info.role}'s plan: "
                + " ".join(messages[-2:]),
                "Build for kind onnxruntime",
            )
    if timings is not None:
        save_timings(config, timings)
    write_info(directory, replace(info, kind="tensorrt", plan=plan))
    path.unlink()
    (directory / WEIGHTS_FILE).unlink()


def describe(
    path: Path,
    graph: ir.Graph,
    info: EngineInfo,
    engine: TensorRT,
    targets: tuple[str, ...],
    prefill_chunk: int,
) -> PlanInfo:
    """Return the plan's entry for `engine.json`; `path` has the graph before casts."""
    prefill_chunk = max(min(prefill_chunk, info.max_seq_len), info.most_verified)
    if info.role == "drafter":  # a chunk's features come with buffered ones
        prefill_chunk += MAX_BUFFERED
    return PlanInfo(
        library=engine.library,
        version=trt.__version__,
        compute_capabilities=targets,
        dtype=DTYPES[engine.dtype].numpy().name,
        graph=hashlib.sha256(path.read_bytes()).hexdigest(),
        prefill_chunk=prefill_chunk,
        profiles=make_profiles(info, prefill_chunk),
        inputs={str(value.name): _dtype_and_shape(value) for value in graph.inputs},
        outputs={str(value.name): _dtype_and_shape(value) for value in graph.outputs},
        aliases={
            str(node.outputs[0].name): str(node.inputs[0].name)
            for node in graph
            if node.op_type == "TensorScatter" and node.inputs[0] is not None
        },
    )


def make_profiles(info: EngineInfo, chunk: int) -> tuple[Profile, Profile]:
    """Return minimum, optimum and maximum sizes of a round and of a prompt chunk.

    A chunk has one sequence, but taking in buffered features may have more: both profiles allow all
    slots, which costs nothing.
    """
    slots, block, round_ = info.slots, info.block_size, info.most_verified
    context = (1, min(USUAL_CONTEXT, info.cache_len), info.cache_len)

    def sizes(n: int, usual: int, largest: int) -> Profile:
        return {
            "n": (1, n, slots),
            "S": (1, usual, largest),
            "N": context,
            "r": (1, n * block, slots * round_),
            "C": (1, usual, largest),
            "W": (1, block, block),
            "C_W": (2, usual + block, largest + block),
        }

    return sizes(slots, block, round_), sizes(1, chunk, chunk)


def _profile(
    builder: trt.Builder, network: trt.INetworkDefinition, plan: PlanInfo, sizes: Profile
) -> trt.IOptimizationProfile:
    profile = builder.create_optimization_profile()
    for name, (_, shape) in plan.inputs.items():
        bounds = (
            trt.Dims([sizes[size][i] if isinstance(size, str) else size for size in shape])
            for i in range(3)
        )
        profile.set_shape(name, *bounds)
    return profile


def capabilities(engine: TensorRT) -> tuple[str, ...]:
    """Return the compute capabilities to build for; EngineError without the library or GPU."""
    use(engine.library)
    if engine.library == "tensorrt_rtx":
        return tuple(engine.compute_capabilities or CAPABILITIES)
    capabilities = compute_capabilities()
    if not capabilities:
        raise EngineError(
            "the library tensorrt builds plans on the GPU that will run them, and here is none",
            "Build on that machine, or choose engine.library: tensorrt_rtx, which needs no GPU",
        )
    return (capabilities[0],)


def timing_cache(plan: PlanInfo) -> Path:
    """Return the file that keeps kernel timings between builds, per library version and GPU."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    capability = plan.compute_capabilities[0]
    return Path(base) / "dflash-trt" / f"{plan.library}-{plan.version}-{capability}.timing"


def save_timings(config: trt.IBuilderConfig, file: Path) -> None:
    serialized: Any = config.get_timing_cache().serialize()  # a buffer, which its type hides
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_bytes(serialized)
    fresh.replace(file)


def _dtype_and_shape(value: ir.Value) -> tuple[str, Shape]:
    assert value.dtype is not None
    assert value.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return value.dtype.numpy().name, shape


def _writer(file: BinaryIO) -> trt.IStreamWriter:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: Any, *_: object) -> int:
            return file.write(data)

    return Writer()
