"""`serving.style: llmapi`: the layout of TensorRT-LLM's own Triton model, for who uses it already.

Its tensors are in `model_repository/tensorrt_llm`. Its `model.py` and `helpers.py` are not ours to
hand on; the README beside them says where they are.
"""

from pathlib import Path
from typing import Any

import yaml

from dflash_trt.serving.llm import ARGS, read_args

# as triton_backend/all_models/llmapi/tensorrt_llm/1/model.py reads it
TRITON = {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100}


def model_yaml(directory: Path) -> str:
    """`1/model.yaml` of a build: the arguments of `LLM(...)`, and what Triton must know.

    Paths start at the build: the process runs there.
    """
    args = read_args(directory / "engines")
    speculative = dict(args["speculative_config"])
    here = directory / "engines" / ARGS.parent
    for values, name in ((args, "model"), (speculative, "speculative_model")):
        if (here / values[name]).is_dir():  # else it is an id of the Hub
            values[name] = str((here / values[name]).relative_to(directory))
    content: dict[str, Any] = {
        **args,
        "speculative_config": speculative,
        "triton_config": TRITON,
    }
    return yaml.safe_dump(content, sort_keys=False)
