"""TensorRT-LLM's own judgement of a bundle's arguments, where it is installed; nothing is loaded.

`python -m dflash_trt.tensorrt_llm.judgement ENGINE`, in a process of its own: importing it takes
long, may fail, and starts CUDA. It prints one JSON object.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.tensorrt_llm.hub_cache import with_cached_target
from dflash_trt.tensorrt_llm.info import read_info, read_llm_args

TIMEOUT = 300.0  # seconds


def refused_arguments(engine: Path) -> list[str]:
    """What `TorchLlmArgs` says against the arguments of `LLM(...)`; empty where it takes them.

    Raises NotKnown where there is no TensorRT-LLM of the bundle's version, or it cannot say.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise NotKnown("TensorRT-LLM is not installed")
    command = [sys.executable, "-m", __name__, str(engine)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NotKnown(f"TensorRT-LLM said nothing of them in {TIMEOUT:.0f} s") from None
    said = [line for line in done.stdout.splitlines() if line.startswith(f'{{"{ANSWER}"')]
    if not said:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no reason"])[-1]
        raise NotKnown(f"TensorRT-LLM cannot judge them here: {last.strip()}")
    answer = json.loads(said[-1])
    if answer[ANSWER] != (wanted := read_info(engine).version):
        raise NotKnown(f"TensorRT-LLM {answer[ANSWER]} is installed, the build is for {wanted}")
    return list(answer["refused"])


ANSWER = "tensorrt_llm"  # its version; it writes lines of its own, too


def _judge(engine: Path) -> dict[str, Any]:
    import tensorrt_llm  # noqa: PLC0415
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs  # noqa: PLC0415

    refused: list[str] = []
    try:
        TorchLlmArgs(**with_cached_target(read_llm_args(engine)))
    except (ValueError, AssertionError, TypeError) as error:  # pydantic's is a ValueError
        listed: list[dict[str, Any]] = getattr(error, "errors", list)()
        refused = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in listed]
        refused = refused or [" ".join(str(error).split())]
    return {ANSWER: tensorrt_llm.__version__, "refused": refused}


if __name__ == "__main__":
    print(json.dumps(_judge(Path(sys.argv[1]))))
