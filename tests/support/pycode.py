"""The demo pair in examples/pycode: its config, and its prompts."""

import json
from pathlib import Path
from typing import Any

from dflash_trt.config import BuildConfig, load_config
from dflash_trt.machine import usable_cores

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "build_configs" / "pycode.yaml"
PYCODE = ROOT / "examples" / "pycode"


def demo_config() -> BuildConfig:
    """Use a thread per core: beside busy clients a server would take fewer, after minutes."""
    config = load_config(CONFIG)
    engine = config.engine.model_copy(update={"threads": usable_cores()})
    return config.model_copy(update={"engine": engine})


def prompt_texts(count: int | None = None) -> list[str]:
    return [prompt["text"] for prompt in _prompts()[:count]]


def prompt_ids(count: int | None = None) -> list[list[int]]:
    return [prompt["ids"] for prompt in _prompts()[:count]]


def _prompts() -> list[dict[str, Any]]:
    lines = (PYCODE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
