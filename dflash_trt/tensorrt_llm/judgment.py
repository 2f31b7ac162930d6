"""Validation of a bundle's arguments by an installed TensorRT-LLM, without loading a model.

`python -m dflash_trt.tensorrt_llm.judgment ENGINE` runs in a separate process: importing
TensorRT-LLM is slow, may fail, and starts CUDA. It prints one JSON object.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.tensorrt_llm.info import read_llm_args

TIMEOUT = 300.0  # seconds
ANSWER = "tensorrt_llm"  # key of the version; TensorRT-LLM prints other lines too


def judged_arguments(engine: Path) -> tuple[str, list[str]]:
    """Return the installed version, and errors of its `TorchLlmArgs` for the arguments.

    Raises NotKnown if none is installed or it fails.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise NotKnown("TensorRT-LLM is not installed")
    command = [sys.executable, "-m", __name__, str(engine)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NotKnown(f"TensorRT-LLM was not imported in {TIMEOUT:.0f} s") from None
    said = [line for line in done.stdout.splitlines() if line.startswith(f'{{"{ANSWER}"')]
    if not said:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no reason"])[-1]
        raise NotKnown(f"TensorRT-LLM cannot be imported: {last.strip()}")
    answer = json.loads(said[-1])
    return answer[ANSWER], answer["refused"]


def _judge(engine: Path) -> dict[str, Any]:
    import tensorrt_llm  # noqa: PLC0415
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs  # noqa: PLC0415

    refused: list[str] = []
    try:
        TorchLlmArgs(**read_llm_args(engine))
    except (ValueError, AssertionError, TypeError) as error:  # pydantic's error is a ValueError
        listed: list[dict[str, Any]] = getattr(error, "errors", list)()
        refused = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in listed]
        refused = refused or [" ".join(str(error).split())]
    return {ANSWER: tensorrt_llm.__version__, "refused": refused}


if __name__ == "__main__":
    print(json.dumps(_judge(Path(sys.argv[1]))))
