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

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
        awq = "awq" in str(recipe["algorithm"])  # which scales the weights, too
        layerwise = {"enable": True, "calib_mutates_weights": awq}
        recipe["algorithm"] = {"method": "awq_lite" if awq else "max", "layerwise": layerwise}
        if awq:
            _set_group(recipe, task["group"])
            _keep_changes_on_disk(model, Path(offload))
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
        if awq:
            _fuse(model)
        elif task["recipe"].startswith("FP8"):
            _share_scales(model)
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


def _set_group(recipe: dict[str, Any], group: int) -> None:
    """How many inputs of a matrix have one scale."""
    for entry in recipe["quant_cfg"]:
        parts = entry.get("cfg", [])
        for part in parts if isinstance(parts, list) else [parts]:
            if "block_sizes" in part:
                part["block_sizes"][-1] = group


class _OnDisk(dict[str, Any]):
    """Tensors by name, each in a file; the dict itself holds where."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._written = folder, 0

    def __setitem__(self, name: str, tensor: Any) -> None:
        from safetensors.torch import save_file  # noqa: PLC0415

        # a new file, since the last one may still be mapped
        self._written += 1
        file = self._folder / f"changed-{self._written}.safetensors"
        save_file({name: tensor.contiguous()}, file)
        if name in self:
            self.file(name).unlink()
        super().__setitem__(name, file)

    def __getitem__(self, name: str) -> Any:
        from safetensors.torch import load_file  # noqa: PLC0415

        return load_file(self.file(name))[name]

    def file(self, name: str) -> Path:
        return Path(super().__getitem__(name))


def _keep_changes_on_disk(model: Any, folder: Path) -> None:
    """Where ModelOpt keeps the weights of a layer on disk that it changed; by itself in memory."""
    maps = (getattr(getattr(m, "_hf_hook", None), "weights_map", None) for m in model.modules())
    for loader in {id(found.dataset): found.dataset for found in maps if found}.values():
        loader.state_dict = _OnDisk(folder)


def _share_scales(model: Any) -> None:
    """One scale for matrices that TensorRT-LLM and vLLM join: of several they take the largest, and
    round the weights a second time. ModelOpt's export does this for all but FP8."""
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion  # noqa: PLC0415

    for parent in model.modules():
        for names in JOINED:
            found = [getattr(parent, name, None) for name in names]
            if all(hasattr(each, "weight_quantizer") for each in found):
                preprocess_linear_fusion(found)


def _fuse(model: Any) -> None:
    """What the export does first, a layer at a time: there it would change weights left on disk.

    Matrices with the same input get one scale of its columns, and the norm before takes it over.
    """
    import torch  # noqa: PLC0415
    from modelopt.torch.export.unified_export_hf import (  # noqa: PLC0415
        _fuse_shared_input_modules,
        collect_shared_input_modules,
    )
    from modelopt.torch.quantization.utils.core_utils import (  # noqa: PLC0415
        enable_weight_access_and_writeback,
    )
    from modelopt.torch.quantization.utils.layerwise_calib import (  # noqa: PLC0415
        LayerActivationCollector,
    )

    matrices, norms = collect_shared_input_modules(
        model, lambda: model(torch.ones([1, 2], dtype=torch.long)), collect_layernorms=True
    )
    for layer in LayerActivationCollector.get_decoder_layers(model):
        own = {id(module) for module in layer.modules()}
        of_layer = {x: found for x, found in matrices.items() if id(found[0]) in own}
        with enable_weight_access_and_writeback(layer, model):
            _fuse_shared_input_modules(model, of_layer, norms, fuse_layernorms=True)


if __name__ == "__main__":
    main()
