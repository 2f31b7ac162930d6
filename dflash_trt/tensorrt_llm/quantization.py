"""Quantization of a target with ModelOpt, in a separate process.

Writes ModelOpt's export with the original's config and tokenizer: `model*.safetensors`,
`hf_quant_config.json`, and `quantization_config` in config.json.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import (
    INDEX,
    MODELOPT_FILE,
    Report,
    Target,
    read_json,
    small_files,
)
from dflash_trt.config import Quantize
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.files import copy_file
from dflash_trt.planning import Machine

# compute capabilities and targets (prefixes of `architectures`) with kernels in TensorRT-LLM's
# PyTorch backend: docs/source/features/quantization.md (main, August 2026)
NVFP4_TARGETS = ("LlamaFor", "Llama4", "MixtralFor", "Qwen2", "Qwen3For", "Qwen3MoeFor")
KERNELS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "fp8": ((89, 90, 100, 103, 120), (*NVFP4_TARGETS, "MistralFor", "Gemma3", "Exaone")),
    "nvfp4": ((100, 103, 120), NVFP4_TARGETS),
}
NEEDED = ("modelopt", "torch", "transformers", "accelerate")
PROCESS = "dflash_trt.tensorrt_llm.quantize_process"
# return freed tensors of 1 MB and more to the system (mallopt(3)); otherwise memory read from many
# files stayed allocated, up to the model's size
VARIABLES = {"HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}


def check_quantizable(asked: Quantize, target: Target, machine: Machine) -> None:
    """Raise ConfigError if TensorRT-LLM has no kernels or the target cannot be quantized.

    Raises BuildError if a package is not installed.
    """
    method, gpu, name = asked.method, machine.gpu, target.architecture
    of_gpu = [m for m, (capabilities, _) in KERNELS.items() if gpu.sm in capabilities]
    of_both = [m for m in of_gpu if name.startswith(KERNELS[m][1])]
    instead = f"Set engine.quantize to {' or '.join(of_both)}, or leave it out"
    instead = instead if of_both else "Leave engine.quantize out"
    if method not in of_gpu:
        raise ConfigError(f"TensorRT-LLM has no {method} kernels for {gpu.name}", instead)
    if method not in of_both:
        raise ConfigError(f"TensorRT-LLM lists no {method} for {name}", instead)
    if target.values.get("quantization_config") or (target.directory / MODELOPT_FILE).is_file():
        raise ConfigError(
            f"the target {target.directory} is quantized already", "Leave engine.quantize out"
        )
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise BuildError(
            f"engine.quantize needs {', '.join(missing)}, which is not installed",
            "pip install 'dflash-trt[quantize]'",
        )


def announced(asked: Quantize | None, target: Target) -> Target:
    """Return the target with its future config.json, before anything is written."""
    if asked is None:
        return target
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": asked.method.upper()}
    config["ignore"] = ["lm_head"]
    if asked.kv_cache == "fp8":
        config["kv_cache_quant_algo"] = "FP8"
    return replace(target, values={**target.values, "quantization_config": config})


def quantize_target(
    asked: Quantize, source: Path, output: Path, texts: Sequence[Sequence[int]], report: Report
) -> None:
    """Quantize `source` into the new directory `output`; texts: token ids for calibration.

    Raises BuildError if ModelOpt fails.
    """
    output.mkdir(parents=True)
    task = {
        "source": str(source),
        "output": str(output),
        "method": asked.method,
        "kv_cache": asked.kv_cache,
        "texts": texts,
    }
    if failure := _run(task, report):
        raise BuildError(
            f"ModelOpt could not quantize {source} ({failure})",
            "Leave engine.quantize out, or take a published quantized checkpoint",
        )
    exported = read_json(output / "config.json")
    for file in small_files(source):
        if file.name != INDEX:
            copy_file(file, output / file.name)
    config = read_json(source / "config.json")
    config["quantization_config"] = exported["quantization_config"]
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _run(task: dict[str, Any], report: Report) -> str:
    """Return the error, or ""; the process ends when its input does."""
    command = [sys.executable, "-m", PROCESS]
    pipe, variables = subprocess.PIPE, os.environ | VARIABLES
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(OSError):  # it ended
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            said = json.loads(line)
            if "done" not in said:
                return str(said.get("error", ""))
            report("quantizing the target", said["done"], said["total"])
        code = process.wait()
        killed = f", killed by {signal.Signals(-code).name}" if code < 0 else ""
        return f"its process ended{killed}; there may be too little memory"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
