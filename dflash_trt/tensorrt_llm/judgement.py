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
from dflash_trt.tensorrt_llm.info import read_llm_args

TIMEOUT = 300.0  # seconds
ANSWER = "refused"  # the key of the object; TensorRT-LLM writes lines of its own, too


def refused_arguments(engine: Path) -> list[str]:
    """Return what `TorchLlmArgs` says against the arguments; empty where it takes them.

    It is that of the installed release, whatever the build is for. Raises NotKnown where none is
    installed, or it cannot say.
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
    return list(json.loads(said[-1])[ANSWER])


def _judge(engine: Path) -> list[str]:
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs  # noqa: PLC0415

    try:
        TorchLlmArgs(**read_llm_args(engine))
    except (ValueError, AssertionError, TypeError) as error:  # pydantic's is a ValueError
        listed: list[dict[str, Any]] = getattr(error, "errors", list)()
        refused = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in listed]
        return refused or [" ".join(str(error).split())]
    return []


if __name__ == "__main__":
    print(json.dumps({ANSWER: _judge(Path(sys.argv[1]))}))
