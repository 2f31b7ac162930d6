"""What vLLM's loader makes of a target that `engine.quantize` wrote, tensor by tensor; no GPU.

    PYTHON scripts/read_by_vllm.py TARGET

PYTHON: of an environment of its own, `pip install vllm==0.33.0` (10 GB, NVIDIA's torch with it).
TARGET: `engines/tensorrt_llm/target` of a bundle, of a model without experts. vLLM's own classes
make the model on the CPU and load the checkpoint, and each of its tensors is looked for in their
parameters, bit by bit, but for those that vLLM casts to bfloat16. What it does afterwards, a layout
for each kind of kernel, is not compared. Exit code 1 where one is another.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["VLLM_BATCH_INVARIANT"] = "1"  # NVFP4's kernel is the emulated one: others want a GPU

from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


def load(target: Path, rendezvous: str) -> tuple[Any, str]:
    """vLLM's model as its loader leaves it, and the name of the class that read its config."""
    dtype = torch.bfloat16
    asked = EngineArgs(str(target), dtype="bfloat16", enforce_eager=True, max_model_len=64)
    config = asked.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel()
        model = initialize_model(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model, type(config.quant_config).__name__


def found(model: Any, name: str) -> torch.Tensor:
    """The part of a parameter that vLLM keeps a tensor of the checkpoint in."""
    path, _, kind = name.rpartition(".")
    parent, _, part = path.rpartition(".")
    if kind in ("k_scale", "v_scale"):  # of the KV cache
        return model.get_parameter(f"{parent}.attn.{kind}").data
    for fused, parts in model.packed_modules_mapping.items():
        if part in parts:
            module = model.get_submodule(f"{parent}.{fused}")
            parameter, index = getattr(module, kind).data, parts.index(part)
            rows = module.output_partition_sizes
            if parameter.shape[0] == len(rows):
                return parameter[index]
            return parameter[sum(rows[:index]) : sum(rows[: index + 1])]
    return model.get_parameter(name).data


def main(target: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model, reader = load(target, f"{folder}/rendezvous")
    counts: Counter[str] = Counter()
    for file in target.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            kept = found(model, name)
            cast = kept.dtype != tensor.dtype
            same = kept.flatten().equal(tensor.to(kept.dtype).flatten())
            counts["equal, cast" if same and cast else "equal" if same else "other"] += 1
            if not same:
                print(f"another: {name} {tensor.dtype} {kept.dtype}")
    print(f"{reader}, {type(model).__name__}: {dict(counts)}")
    return int(counts["other"] > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
