"""Compile the kernels of engine kind `pytorch` for a GPU that is not here.

    python -m tests.support.compiled CAPABILITY CASE DTYPE RESULTS

A process of its own, as others use Triton's interpreter. CASE is a family of `families.py`, or
`qwen3-8b`, two layers of its sizes, of which steps are run on the CPU; or `sizes`, heads and norms
of published models. What launches a kernel compiles it with the arguments of the launch, as far as
the machine code, and computes nothing. RESULTS is a file of `Compiled` in JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton: `tests` has set it

import torch
import triton
from triton.runtime import JITFunction, driver

from dflash_trt.builder.engines import EngineOptions
from dflash_trt.checkpoints import load_drafter, load_target
from dflash_trt.config import Storage
from dflash_trt.engines import load_engine
from dflash_trt.engines.pytorch import launch
from dflash_trt.engines.pytorch.engine import Engine
from tests.gpu.sizes import QWEN3_8B
from tests.gpu.sparse import write_sparse_pair
from tests.standins.triton_driver import Driver
from tests.support.builds import write_engines
from tests.support.families import HYBRIDS, make, pair_of

# bytes of shared memory that a kernel may have: CUDA C++ Programming Guide, table of compute
# capabilities, "maximum amount of shared memory per thread block"
KIB_SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
SHARED = {capability: kib << 10 for capability, kib in KIB_SHARED.items()}
TENSOR_CORES = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"
BIG, SIZES = "qwen3-8b", "sizes"
LENGTH = 512
TWO_LAYERS = replace(QWEN3_8B, layers=2, taps=(0, 1), draft_layers=1, vocab=9088, longest=LENGTH)
# sequences, and tokens of each
ROWS = ((1, 1), (1, 3), (1, 16), (3, 5), (2, 16), (4, 16), (8, 16), (1, LENGTH))


@dataclass(frozen=True)
class Compiled:
    name: str
    constants: dict[str, int]
    shared: int  # bytes of a multiprocessor's memory
    registers: int  # of a thread
    stack: int  # bytes of a thread that registers have no room for
    tensor_products: int  # instructions of tensor cores
    sums: list[str]  # which of a row's numbers each thread adds up, in Triton's words


def resources(machine_code: bytes) -> tuple[int, int]:
    """Return registers and bytes on the stack of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])


def sums_of_rows(text: str) -> list[str]:
    """Return the layouts of a program's matrices whose rows are reduced, in order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    reduced = re.findall(
        r"<\{axis = 1[^}]*\}> .*?\}\) : \(tensor<[^>]*, (#\w+)>\)", text, re.DOTALL
    )
    return [layouts[name] for name in reduced]


def compiled(kernel: Any, constants: dict[str, Any]) -> Compiled:
    registers, stack = resources(kernel.asm["cubin"])
    return Compiled(
        name=kernel.metadata.name,
        constants={name: int(value) for name, value in constants.items()},
        shared=kernel.metadata.shared,
        registers=registers,
        stack=stack,
        tensor_products=len(re.findall(TENSOR_CORES, kernel.asm["ptx"])),
        sums=sums_of_rows(kernel.asm["ttgir"]),
    )


def compile_launches(capability: int) -> dict[str, Compiled]:
    """Let launches only compile, for GPU 0 of a capability; return kernels by their hash."""
    kernels: dict[str, Compiled] = {}

    def launcher(function: Any, grid: Any) -> Callable[..., None]:
        def compile_only(*arguments: Any, **constants: Any) -> None:
            kernel = function.warmup(*arguments, grid=grid, **constants)
            if kernel.hash not in kernels:
                kernels[kernel.hash] = compiled(kernel, constants)

        return compile_only

    driver.set_active(Driver(capability))
    JITFunction.__getitem__ = launcher
    launch.shared_memory = lambda _: SHARED[capability]
    return kernels


def build(name: str, dtype: str, folder: Path) -> Path:
    """Build a pair and return the folder of its engines; dtype: also `fp8`, beside bfloat16."""
    fp8 = dtype == "fp8"
    options = EngineOptions(
        slots=max(n for n, _ in ROWS),
        max_seq_len=LENGTH,
        kind="pytorch",
        dtype="bfloat16" if fp8 else dtype,
        storage=Storage(fp8=fp8),
    )
    if name == BIG:
        write_sparse_pair(folder, TWO_LAYERS)
        target_dir, drafter_dir = folder / "target", folder / "drafter"
    else:
        pair = make(name, folder) if name in HYBRIDS else pair_of(name, "z-lab", folder)
        target_dir, drafter_dir = pair.target_dir, pair.drafter_dir
    write_engines(load_target(target_dir), load_drafter(drafter_dir), folder / "engines", options)
    return folder / "engines"


def run_steps(engines: Path) -> None:
    """Run steps of few and of many rows; their inputs are 0."""
    for role in ("target", "drafter"):
        engine = load_engine(engines / role)
        assert isinstance(engine, Engine)
        engine.use_kernels()
        block = engine.info.block_size
        for n, width in ROWS if role == "target" else [(n, block) for n, _ in ROWS]:
            context = block if role == "drafter" else 0
            step = engine.step(0, n, width, LENGTH, n * width, context)
            if engine.info.states is not None:
                step.inputs["known"][...] = width
            step.run()


def launch_sizes(dtype: torch.dtype) -> None:
    """Attend with heads, and norm residual streams, of the sizes that models have."""
    for size in (64, 96, 128, 256, 512):
        cache = torch.empty(1, 8, LENGTH, size, dtype=dtype)
        for width in (1, 16):
            q = torch.empty(1, 32, width, size, dtype=dtype)
            mask = torch.empty(1, 1, width, LENGTH, dtype=torch.bool)
            sizes: Any = {"heads": 32, "kv_heads": 8, "head_dim": size, "scale": 1.0}
            launch.attend(q, cache, cache, mask, None, None, **sizes, dtype=dtype)
    for size in (576, 2048, 4096, 5120, 8192, 12288):
        residual, weight = torch.empty(16, size), torch.empty(size)
        parts = torch.empty(2, 16, size)
        launch.add_norm(parts, None, residual, weight, epsilon=1e-6, dtype=dtype)


def main(capability: int, case: str, dtype: str, results: Path) -> None:
    kernels = compile_launches(capability)
    if case == SIZES:
        launch_sizes(getattr(torch, dtype))
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_steps(build(case, dtype, Path(folder)))
    results.write_text(json.dumps([asdict(kernel) for kernel in kernels.values()], indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
