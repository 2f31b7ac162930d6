"""Quantization of a target with ModelOpt, in a separate process.

ModelOpt changes `transformers` on import, and torch is large: both stay out of our process. The
task is the first line of its stdin, and it ends when stdin does; each line of stdout is a JSON
object: `done` of `total`, or finally `error` or `finished`.

Writes ModelOpt's export with the original's config and tokenizer: `model*.safetensors`,
`hf_quant_config.json`, and `quantization_config` in config.json.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.checkpoints import Report, Target, is_converted, small_files, write_tokenizer
from dflash_trt.config import Precision
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.files import copy_file
from dflash_trt.hardware import Machine
from dflash_trt.weights import INDEX, MODELOPT_FILE, read_json


class Kernels(NamedTuple):
    """What has kernels in TensorRT-LLM's PyTorch backend."""

    capabilities: tuple[int, ...]  # of GPUs
    targets: tuple[str, ...]  # prefixes of `architectures`


# docs/source/features/quantization.md (main, August 2026)
NVFP4_TARGETS = ("LlamaFor", "Llama4", "MixtralFor", "Qwen2", "Qwen3For", "Qwen3MoeFor")
KERNELS = {
    "fp8": Kernels((89, 90, 100, 103, 120), (*NVFP4_TARGETS, "MistralFor", "Gemma3", "Exaone")),
    "nvfp4": Kernels((100, 103, 120), NVFP4_TARGETS),
}
NEEDED = ("modelopt", "torch", "transformers", "accelerate")
RECIPES = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# return freed tensors of 1 MB and more to the system (mallopt(3)); otherwise memory read from many
# files stayed allocated, up to the model's size
VARIABLES = {"HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}


def check_quantizable(method: Precision, target: Target, machine: Machine) -> None:
    """Raise ConfigError if kernels or the target forbid it, BuildError if a package is missing."""
    gpu = machine.gpu
    name = target.architecture
    of_gpu = [other for other, kernels in KERNELS.items() if gpu.sm in kernels.capabilities]
    of_both = [other for other in of_gpu if name.startswith(KERNELS[other].targets)]
    instead = "Leave engine.quantize out"
    if of_both:
        instead = f"Set engine.quantize to {' or '.join(of_both)}, or leave it out"
    if method not in of_gpu:
        raise ConfigError(f"TensorRT-LLM has no {method} kernels for {gpu.name}", instead)
    if method not in of_both:
        raise ConfigError(f"TensorRT-LLM lists no {method} for {name}", instead)
    if target.values.get("quantization_config") or (target.directory / MODELOPT_FILE).is_file():
        raise ConfigError(
            f"the target {target.directory} is quantized already", "Leave engine.quantize out"
        )
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise BuildError(
            f"engine.quantize needs {', '.join(missing)}, which is not installed",
            "pip install 'dflash-trt[quantize]'",
        )


def as_if_quantized(method: Precision | None, target: Target) -> Target:
    """Return the target with its future config.json, before anything is written."""
    if method is None:
        return target
    config = {"quant_method": "modelopt", "quant_algo": method.upper(), "ignore": ["lm_head"]}
    return replace(target, values={**target.values, "quantization_config": config})


def quantize_target(
    method: Precision, source: Path, output: Path, texts: list[list[int]], report: Report
) -> None:
    """Quantize into the new directory `output`; texts: token ids. BuildError if ModelOpt fails."""
    output.mkdir(parents=True)
    task = {"source": str(source), "output": str(output), "method": method, "texts": texts}
    failure = _run_process(task, report)
    if failure:
        raise BuildError(
            f"ModelOpt could not quantize {source} ({failure})",
            "Leave engine.quantize out, or take a published quantized checkpoint",
        )
    exported = read_json(output / "config.json")
    for file in small_files(source):
        if file.name != INDEX:
            copy_file(file, output / file.name)
    if is_converted(source):
        write_tokenizer(source, output)
    config = read_json(source / "config.json")
    config["quantization_config"] = exported["quantization_config"]
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _run_process(task: dict[str, Any], report: Report) -> str:
    """Return the error, or ""; the process ends when its input does."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | VARIABLES,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(OSError):  # it ended
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            message = json.loads(line)
            if "done" not in message:
                return str(message.get("error", ""))
            report("quantizing the target", message["done"], message["total"])
        code = process.wait()
        killed = f", killed by {signal.Signals(-code).name}" if code < 0 else ""
        return f"its process ended{killed}; there may be too little memory"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main() -> None:
    write = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # progress bars and warnings
        os.dup2(nowhere, stream.fileno())
    task = json.loads(sys.stdin.readline())

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    def report(done: int, total: int) -> None:
        print(json.dumps({"done": done, "total": total}), file=write)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        _quantize(task, report)
        print(json.dumps({"finished": True}), file=write)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        print(json.dumps({"error": f"{type(error).__name__}: {lines[-1]}"[:500]}), file=write)
    os._exit(0)  # skip exit handlers of libraries, which may hang


def _quantize(task: dict[str, Any], report: Callable[[int, int], None]) -> None:
    import torch  # noqa: PLC0415
    from modelopt.torch import quantization as mtq  # noqa: PLC0415
    from modelopt.torch.export import export_hf_checkpoint  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    causal: Any = AutoModelForCausalLM
    scratch = Path(task["output"]).parent
    with tempfile.TemporaryDirectory(dir=scratch) as offload, torch.no_grad():
        # on the available GPUs, else in memory; the rest goes to `offload`
        options: Any = {"device_map": "auto", "offload_folder": offload}
        model = causal.from_pretrained(
            task["source"], dtype="auto", local_files_only=True, **options
        )
        layers = model.config.get_text_config().num_hidden_layers
        passes = 0
        recipe = copy.deepcopy(getattr(mtq, RECIPES[task["method"]]))
        recipe["algorithm"] = {"method": "max", "layerwise": {"enable": True}}

        def feed(model: Any) -> None:
            nonlocal passes
            report(min(passes, layers), layers + 1)
            passes += 1
            for ids in task["texts"]:
                model(torch.tensor([ids], device=model.device))

        model = mtq.quantize(model.eval(), recipe, feed)
        if task["method"] == "fp8":
            _share_scales(model)
        report(layers, layers + 1)
        export_hf_checkpoint(model, export_dir=task["output"])


def _share_scales(model: Any) -> None:
    """Use one scale for matrices that servers fuse; ModelOpt's export omits this for FP8."""
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion  # noqa: PLC0415

    for parent in model.modules():
        for names in JOINED:
            matrices = [getattr(parent, name, None) for name in names]
            if all(hasattr(matrix, "weight_quantizer") for matrix in matrices):
                preprocess_linear_fusion(matrices)
