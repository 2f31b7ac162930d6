"""Targets whose weights are a hole, and the memory that quantizing them takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import torch
from builds import quiet
from holes import size_of, write_hole
from transformers import AutoModelForCausalLM, PretrainedConfig

from dflash_trt.config import Quantize
from dflash_trt.tensorrt_llm.quantization import PROCESS, quantize_target

IDS = [[(7 * i + 3 * j) % 300 for j in range(24)] for i in range(3)]


def write_target(directory: Path, config: PretrainedConfig) -> int:
    """A dense target with its tensors in bfloat16, a file a layer; returns the bytes of one."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    left_out = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {
        name: ("BF16", tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if name not in left_out
    }
    directory.mkdir()
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(directory)
    layers = {name: re.search(r"layers\.\d+", name) for name in tensors}
    files = {name: f"{found[0] if found else 'rest'}.safetensors" for name, found in layers.items()}
    for file in {*files.values()}:
        write_hole(directory / file, {n: each for n, each in tensors.items() if files[n] == file})
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(size_of(each) for name, each in tensors.items() if ".layers.0." in name)


def children(process: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def peak_memory(method: str, target: Path, output: Path) -> int:
    """Quantize it; the most bytes that its process had, without what it has mapped of files."""
    done = threading.Event()
    peaks: list[int] = []

    def watch() -> None:
        while not done.wait(0.02):
            for child in children(os.getpid()):
                with suppress(OSError):
                    # before it has become another program, a child's memory is ours
                    if PROCESS in Path(f"/proc/{child}/cmdline").read_text():
                        lines = Path(f"/proc/{child}/status").read_text().splitlines()
                        peaks.extend(int(x.split()[1]) * 1024 for x in lines if "RssAnon" in x)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        quantize_target(Quantize.model_validate(method), target, output, IDS, quiet)
    finally:
        done.set()
        watcher.join()
    assert peaks
    return max(peaks)
