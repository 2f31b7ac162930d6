"""Print how TensorRT-LLM's own schema of `LLM(...)` differs from the one that we check with.

Run it where TensorRT-LLM is installed.
"""

import difflib
import json
from importlib.resources import files
from typing import Any

import tensorrt_llm
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

FILE = files("dflash_trt.tensorrt_llm").joinpath("llm_args.schema.json")
SAYS_NOTHING = {"title", "description", "status", "$comment", "$schema", "discriminator"}


def rows(node: Any, at: str = "") -> list[str]:
    """Return a line for each value, without what no check looks at."""
    if isinstance(node, dict):
        found = [rows(v, f"{at}.{k}") for k, v in sorted(node.items()) if k not in SAYS_NOTHING]
        return [row for some in found for row in some]
    return [f"{at} = {json.dumps(node, sort_keys=True)}"]


if __name__ == "__main__":
    ours, own = json.loads(FILE.read_text("utf-8")), TorchLlmArgs.model_json_schema()
    names = FILE.name, f"TensorRT-LLM {tensorrt_llm.__version__}"
    print("\n".join(difflib.unified_diff(rows(ours), rows(own), *names, lineterm="", n=0)))
