"""What a step of a hybrid takes beside a dense model of about its size, on this CPU, in turns.

    python scripts/measure_hybrid.py FOLDER [--storage int8] [--context 512] [--profile]

Writes targets of random weights in bf16 into FOLDER, unless they are there: Qwen3.5-0.8B and
Qwen3-0.6B, shapes as in their config.json. Times are medians of one sequence. "Bytes" are what a
step has to read: weights as the engine stores them, the KV entries of the context, and of a hybrid
its states, which are written too.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnxruntime as ort
from safetensors.numpy import save_file

from dflash_trt.builder.engines import EngineOptions, build_target
from dflash_trt.checkpoints import TargetSpec, load_target, target_shapes
from dflash_trt.checkpoints.fields import Config
from dflash_trt.checkpoints.target import FAMILIES
from dflash_trt.config import Storage
from dflash_trt.engines import FIRST_STATE, Engine, load_engine
from dflash_trt.engines.onnxruntime import GRAPH_FILE
from dflash_trt.machine import cpu_model, usable_cores

Bits = Literal[4, 8]
STORAGE: dict[str, Bits | None] = {"as-stored": None, "int8": 8, "int4": 4}
DRAFTS = 7
TURNS = 25
HYBRID, DENSE = "Qwen3.5-0.8B", "Qwen3-0.6B"
# huggingface.co/Qwen/Qwen3.5-0.8B-Base and Qwen/Qwen3-0.6B, as public notes quote them (2026-11)
CONFIGS: dict[str, dict[str, Any]] = {
    HYBRID: {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    DENSE: {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
}


def write_target(directory: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint whose matrices are parts of one random table."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    fields = FAMILIES[config["architectures"][0]](Config(directory / "config.json", config))
    spec = TargetSpec(
        model_type=config["model_type"],
        tie_word_embeddings=True,
        eos_token_ids=(),
        **{"prefix": "model."} | fields,
    )
    dice = np.random.default_rng(0)
    table = dice.normal(size=1 << 22).astype(np.float32)
    tensors = {}
    for name, shape in target_shapes(spec).items():
        size = int(np.prod(shape))
        start = int(dice.integers(len(table)))
        values = np.resize(np.roll(table, start), size).reshape(shape)
        centered = len(shape) == 1
        scale = 0.1 if centered else shape[-1] ** -0.5
        tensors[name] = (values * scale).astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors")


def engine_of(folder: Path, name: str, storage: str) -> Engine:
    checkpoint, directory = folder / name, folder / f"{name}-{storage}"
    if not checkpoint.is_dir():
        write_target(checkpoint, CONFIGS[name])
    if not (directory / "engine.json").is_file():
        directory.mkdir(exist_ok=True)
        options = EngineOptions(slots=2, max_seq_len=2048, storage=Storage(STORAGE[storage]))
        build_target(load_target(checkpoint), None, directory, options)
    return load_engine(directory, alone=True)


def bytes_read(folder: Path, name: str, storage: str, engine: Engine, context: int) -> float:
    """Return the bytes that a step of one token reads, and a hybrid's states that it writes."""
    directory = folder / f"{name}-{storage}"
    stored = (directory / "model.onnx.data").stat().st_size
    config = CONFIGS[name]
    embedding = 2 * config["vocab_size"] * config["hidden_size"]
    # bf16 in the file is float32 when loaded; a quantized head is stored beside the embedding
    read = 2 * stored if STORAGE[storage] is None else stored - embedding
    states = 2 * engine.info.states.kept_bytes if engine.info.states else 0
    return read + engine.info.token_bytes * context + states


def step(engine: Engine, context: int, known: int, drafts: int, accepted: int = 0) -> float:
    """Return the milliseconds of a step of one sequence, all of whose tokens get logits."""
    tokens = known + drafts
    bound = engine.step(0, 1, tokens, _visible(engine, context + tokens), tokens)
    bound.inputs["tokens"][:] = 7
    bound.inputs["positions"][:] = context + np.arange(tokens)
    bound.inputs["write_index"][:] = context
    bound.inputs["scored_tokens"][:] = np.arange(tokens)
    mask = bound.inputs["mask"]
    mask[:] = np.arange(mask.shape[-1]) <= context + np.arange(tokens)[:, None]
    if engine.info.states is not None:
        bound.inputs["known"][:], bound.inputs["accepted"][:] = known, accepted
    return timed(bound.run)


def _visible(engine: Engine, length: int) -> int:
    return -(-length // engine.visible_step) * engine.visible_step


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def measure(engines: dict[str, Engine], context: int) -> dict[str, dict[str, float]]:
    """Return medians in milliseconds by model and what was done; models take turns."""
    works: dict[str, Callable[[Engine], float]] = {
        "plain step": lambda e: step(e, context, 1, 0),
        "verify of 8": lambda e: step(e, context, 1, DRAFTS),
        "8 known tokens": lambda e: step(e, context, 8, 0),
        "verify of 8 after 7 accepted": lambda e: step(e, context, 1, DRAFTS, DRAFTS),
        "move a slot": lambda e: timed(lambda: e.copy_kv(0, 1, context)),
        "keep a state": lambda e: timed(lambda: e.copy_kv(0, FIRST_STATE, 0)),
        "load a state": lambda e: timed(lambda: e.copy_kv(FIRST_STATE, 0, 0)),
    }
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in engines}
    dice = np.random.default_rng(0)
    for engine in engines.values():
        engine.copy_kv(0, FIRST_STATE, 0)  # there to be loaded
    for _ in range(TURNS):
        for what in dice.permutation([*works]):
            for name, engine in engines.items():
                if engine.info.states is None and "state" in what:
                    continue
                works[what](engine)  # after the other one's step nothing is in the caches
                times[name][what].append(works[what](engine))
    return {
        name: {what: median(of[what]) for what in works if what in of} for name, of in times.items()
    }


def profile(directory: Path, engine: Engine, context: int) -> dict[str, float]:
    """Return the share of each op in plain steps of a session of its own."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = engine.info.cpu_threads
    options.enable_mem_reuse = False
    options.enable_profiling = True
    options.profile_file_prefix = str(directory / "profile")
    session = ort.InferenceSession(directory / GRAPH_FILE, options)
    step(engine, context, 1, 0)
    bound = engine.step(0, 1, 1, _visible(engine, context + 1), 1)
    caches = {name: cache[:1] for name, cache in engine._caches.items()}  # type: ignore[attr-defined]
    binding = session.io_binding()
    for name, array in (bound.inputs | caches).items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    outputs = bound.outputs | {f"new_{name}": cache for name, cache in caches.items()}
    for name, array in outputs.items():
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
    for _ in range(8):
        session.run_with_iobinding(binding)
    spent: dict[str, float] = defaultdict(float)
    trace = Path(session.end_profiling())
    for event in json.loads(trace.read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
    trace.unlink()
    total = sum(spent.values())
    return {op: took / total for op, took in sorted(spent.items(), key=lambda one: -one[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--storage", choices=[*STORAGE], default="int8")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    engines = {name: engine_of(options.folder, name, options.storage) for name in (HYBRID, DENSE)}
    print(f"{cpu_model()}, {usable_cores()} cores, {options.storage}, {options.context} tokens")
    timings = measure(engines, options.context)
    for what in timings[HYBRID]:
        line = [f"{name} {of[what]:8.2f} ms" for name, of in timings.items() if what in of]
        if len(line) > 1:
            line.append(f"ratio {timings[HYBRID][what] / timings[DENSE][what]:.2f}")
        print(f"{what:<30}", *line, sep="  ")
    sizes = {
        name: bytes_read(options.folder, name, options.storage, engine, options.context)
        for name, engine in engines.items()
    }
    line = [f"{name} {size / 1e6:8.0f} MB" for name, size in sizes.items()]
    print(
        f"{'bytes of a plain step':<30}",
        *line,
        f"ratio {sizes[HYBRID] / sizes[DENSE]:.2f}",
        sep="  ",
    )
    of = timings[HYBRID]
    second = of["verify of 8"] - of["8 known tokens"]
    print(f"second run over the states: {second:.2f} ms of {of['verify of 8']:.2f}")
    folded = of["verify of 8 after 7 accepted"] - of["verify of 8"]
    print(f"folding in 7 accepted drafts: {folded:.2f} ms")
    if options.profile:
        for name, engine in engines.items():
            directory = options.folder / f"{name}-{options.storage}"
            shares = [*profile(directory, engine, options.context).items()][:12]
            print(name, *(f"{op} {share:.1%}" for op, share in shares), sep=", ")


if __name__ == "__main__":
    main()
