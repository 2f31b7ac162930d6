"""The quantization process; see `quantization.py`.

ModelOpt changes `transformers` on import, and torch is large: both stay out of our process. The
task is the first line of stdin, and the process ends when stdin does; each line of stdout is a JSON
object: `done` of `total`, or finally `error` or `finished`.
"""

import copy
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPES = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
        layers, passes = model.config.get_text_config().num_hidden_layers, 0
        recipe = copy.deepcopy(getattr(mtq, RECIPES[task["method"]]))
        recipe["algorithm"] = {"method": "max", "layerwise": {"enable": True}}
        if task["kv_cache"] == "fp8":
            recipe["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]

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
            found = [getattr(parent, name, None) for name in names]
            if all(hasattr(each, "weight_quantizer") for each in found):
                preprocess_linear_fusion(found)


if __name__ == "__main__":
    main()
