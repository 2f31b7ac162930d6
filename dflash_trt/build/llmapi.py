"""`serving.style: llmapi`: the layout of TensorRT-LLM's own Triton model, for who uses it already.

Its tensors are in `model_repository/tensorrt_llm`. Its `model.py` and `helpers.py` are not ours to
hand on; the README beside them says where they are.
"""

from pathlib import Path

import yaml

from dflash_trt.tensorrt_llm import KIND, read_llm_args

# as triton_backend/all_models/llmapi/tensorrt_llm/1/model.py reads it
TRITON = {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100}


def model_yaml(directory: Path) -> str:
    """`1/model.yaml` of a build: the arguments of `LLM(...)`, and what Triton must know.

    Paths start at the build: the process runs there.
    """
    args, root = read_llm_args(directory / "engines" / KIND), directory.resolve()
    speculative = args["speculative_config"]
    for values, name in ((args, "model"), (speculative, "speculative_model")):
        if Path(values[name]).is_relative_to(root):  # else it is an id of the Hub
            values[name] = str(Path(values[name]).relative_to(root))
    return yaml.safe_dump({**args, "triton_config": TRITON}, sort_keys=False)
