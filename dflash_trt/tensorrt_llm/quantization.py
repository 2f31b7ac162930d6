"""Quantize a target with ModelOpt, in a process of its own, layer by layer.

What is written is what ModelOpt exports, beside the original's own config and tokenizer:
`model*.safetensors`, `hf_quant_config.json`, and `quantization_config` in config.json.
"""

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import (
    INDEX,
    MODELOPT_FILE,
    ModelSummary,
    Report,
    Target,
    Weights,
    read_json,
    small_files,
)
from dflash_trt.child import start_module
from dflash_trt.config import Quantize
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.files import copy_file, data_file
from dflash_trt.planning import Machine

TABLE: dict[str, Any] = data_file(__file__, "quantization.yaml")
NEEDED = ("modelopt", "torch", "transformers", "accelerate")
SHARD = "1GB"  # of a file that is written, and held in memory before
PROCESS = "dflash_trt.tensorrt_llm.quantize_process"
# tensors of 1 MB and more go back to the system when they are freed (mallopt(3)); else what is read
# of many files stayed, up to the size of the model
VARIABLES = {"HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}


def check_quantizable(asked: Quantize, target: ModelSummary[Target], machine: Machine) -> None:
    """ConfigError where TensorRT-LLM has no kernels or the target cannot be quantized; BuildError
    where something is not installed."""
    method, gpu = asked.method, machine.gpu
    of_gpu = [m for x in TABLE["gpus"].values() if gpu.sm in x["sm"] for m in x["methods"]]
    if method not in of_gpu:
        raise ConfigError(
            f"TensorRT-LLM has no {method} kernels for {gpu.name} (SM{gpu.sm})", _instead(of_gpu)
        )
    starts = [each for each in TABLE["targets"] if target.architecture.startswith(each)]
    of_target = TABLE["targets"][max(starts, key=len)] if starts else []
    if method not in of_target:
        raise ConfigError(
            f"TensorRT-LLM lists no {method} for {target.architecture}",
            _instead([each for each in of_target if each in of_gpu]),
        )
    if target.values.get("quantization_config") or (target.directory / MODELOPT_FILE).is_file():
        raise ConfigError(
            f"the target {target.directory} is quantized already", "Leave engine.quantize out"
        )
    _group(asked, target.directory)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise BuildError(
            f"engine.quantize needs {', '.join(missing)}, which is not installed",
            "pip install 'dflash-trt[quantize]'",
        )


def _group(asked: Quantize, directory: Path) -> int | None:
    """How many inputs of a matrix have one scale; None where the method has no choice.

    ConfigError where none that TensorRT-LLM knows divides all of them.
    """
    groups = TABLE["methods"][asked.method].get("groups")
    if not groups:
        return None
    weights = Weights(directory)
    layers = [n for n in weights.names if n.endswith("_proj.weight") and "vision" not in n]
    inputs = {weights.shape(name)[-1]: name for name in layers}
    for group in groups:
        if not any(width % group for width in inputs):
            return int(group)
    wrong = next(width for width in inputs if width % groups[-1])
    raise ConfigError(
        f"{asked.method} has a scale for {groups[-1]} inputs, and {inputs[wrong]} has {wrong}",
        "Take another method for engine.quantize, or leave it out",
    )


def _instead(methods: Sequence[str]) -> str:
    others = f"Set engine.quantize to {' or '.join(methods)}, or leave it out"
    return others if methods else "Leave engine.quantize out"


def announced(asked: Quantize | None, target: ModelSummary[Target]) -> ModelSummary[Target]:
    """The target as its config.json will describe it, for a plan before anything is written."""
    if asked is None:
        return target
    algorithm = TABLE["methods"][asked.method]["algorithm"]
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm}
    config["ignore"] = ["lm_head"]
    if target.weights is not None:
        config["group_size"] = _group(asked, target.directory)
    if asked.kv_cache == "fp8":
        config["kv_cache_quant_algo"] = "FP8"
    return replace(target, values={**target.values, "quantization_config": config})


def quantize_target(
    asked: Quantize, source: Path, output: Path, texts: Sequence[Sequence[int]], report: Report
) -> None:
    """Write `source`, quantized, to the new directory `output`; texts: token ids to calibrate on.

    In memory are one layer, embedding and head, a shard, and the texts' hidden states.
    BuildError where ModelOpt fails, or writes what the original is not.
    """
    output.mkdir(parents=True)
    task = {
        "source": str(source),
        "output": str(output),
        "scratch": str(output.parent),
        "recipe": TABLE["methods"][asked.method]["recipe"],
        "group": _group(asked, source),
        "kv_cache": asked.kv_cache,
        "texts": texts,
        "shard": SHARD,
    }
    failure = _run(task, report)
    if failure:
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
    _check_written(source, output)


def _run(task: dict[str, Any], report: Report) -> str:
    """What went wrong, "" if nothing."""
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    with theirs:
        process = start_module(PROCESS, fd, fds=(fd,), environment=os.environ | VARIABLES)
    try:
        with suppress(OSError), ours.makefile("rw") as lines:  # OSError: it ended
            lines.write(json.dumps(task) + "\n")
            lines.flush()
            for line in lines:
                said = json.loads(line)
                if "done" not in said:
                    return str(said.get("error", ""))
                report("quantizing the target", said["done"], said["total"])
        code = process.wait()
        killed = f", killed by {signal.Signals(-code).name}" if code < 0 else ""
        return f"its process ended{killed}; there may be too little memory"
    finally:
        ours.close()
        process.kill()
        process.wait()


def _check_written(source: Path, output: Path) -> None:
    """Every tensor of the original is there in its shape, what a drafter shares in its numbers."""
    before = Weights(source, read_json(source / "config.json"))
    after = Weights(output, read_json(output / "config.json"))
    tied = {"lm_head.weight"}  # may be left out, or written, where it is the embedding
    wrong = {*before.names} ^ {*after.names}
    wrong -= tied if read_json(source / "config.json").get("tie_word_embeddings") else set()
    both = {*before.names} & {*after.names}
    wrong |= {name for name in both if before.shape(name) != after.shape(name)}
    wrong |= {
        name
        for name in both
        if name.endswith(("embed_tokens.weight", "lm_head.weight"))
        and before.dtype(name) != after.dtype(name)
    }
    if wrong:
        raise BuildError(
            f"ModelOpt wrote another model than {source}: {', '.join(sorted(wrong)[:3])} differ",
            "Leave engine.quantize out, or take a published quantized checkpoint",
        )
