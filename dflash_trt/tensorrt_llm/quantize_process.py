"""The process that quantizes: see `quantization.py`. It ends when its socket is closed.

ModelOpt changes `transformers` when it is imported, and torch is large: neither comes into ours.
"""

import copy
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """`python -m dflash_trt.tensorrt_llm.quantize_process SOCKET`; the task is the first line."""
    link = socket.socket(fileno=int(sys.argv[1]))
    read, write = link.makefile("r"), link.makefile("w")
    task = json.loads(read.readline())

    def end_with_parent() -> None:
        read.readline()
        os._exit(1)

    def say(**fields: object) -> None:
        write.write(json.dumps(fields) + "\n")
        write.flush()

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # bars and warnings
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        _quantize(task, lambda done, total: say(done=done, total=total))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        say(error=f"{type(error).__name__}: {lines[-1]}"[:500])
    else:
        say(finished=True)
    os._exit(0)  # without the end of libraries, which may hang


def _quantize(task: dict[str, Any], report: Callable[[int, int], None]) -> None:
    import torch  # noqa: PLC0415
    from modelopt.torch import quantization as mtq  # noqa: PLC0415
    from modelopt.torch.export import export_hf_checkpoint  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir=task["scratch"]) as offload, torch.no_grad():
        model, layers = _load(Path(task["source"]), offload)
        recipe = copy.deepcopy(getattr(mtq, task["recipe"]))
        # one layer after the other: amax alone is learnt, so that no weight has to be kept
        one_by_one = {"enable": True, "calib_mutates_weights": False}
        recipe["algorithm"] = {"method": "max", "layerwise": one_by_one}
        if task["kv_cache"] == "fp8":
            recipe["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
        passes = 0

        def feed(model: Any) -> None:
            nonlocal passes
            report(min(passes, layers), layers + 1)
            passes += 1
            for ids in task["texts"]:
                model(torch.tensor([ids]))

        model = mtq.quantize(model, recipe, feed)
        report(layers, layers + 1)
        export_hf_checkpoint(model, export_dir=task["output"], max_shard_size=task["shard"])
        report(layers + 1, layers + 1)


def _load(source: Path, offload: str) -> tuple[Any, int]:
    """The model, its layers left on disk until they are run, and how many those are."""
    from accelerate import init_empty_weights  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    causal: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(source)
    with init_empty_weights():
        empty = causal.from_config(config)
    places: dict[str, str] = {}

    def place(name: str, module: nn.Module) -> None:
        inner = dict(module.named_children())
        if isinstance(module, nn.ModuleList):
            places.update({f"{name}.{index}": "disk" for index in inner})
        elif not inner or next(module.parameters(recurse=False), None) is not None:
            places[name] = "cpu"
        else:
            for key, child in inner.items():
                place(f"{name}.{key}" if name else key, child)

    place("", empty)
    layers = sum(where == "disk" for where in places.values())
    model = causal.from_pretrained(
        source, dtype="auto", device_map=places, offload_folder=offload, local_files_only=True
    )
    return model.eval(), layers


if __name__ == "__main__":
    main()
