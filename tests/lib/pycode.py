"""The demo pair in examples/pycode: its config, and the prompts that it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_trt.config import BuildConfig, load_config

ROOT = Path(__file__).parents[2]
PYCODE = ROOT / "examples" / "pycode"


def demo_config() -> BuildConfig:
    return load_config(ROOT / "build_configs" / "pycode.yaml")


def prompt_texts(count: int | None = None) -> list[str]:
    return [prompt["text"] for prompt in _prompts()[:count]]


def prompt_ids(count: int | None = None) -> list[list[int]]:
    """The same as tokens of the target."""
    return [prompt["ids"] for prompt in _prompts()[:count]]


def _prompts() -> list[dict[str, Any]]:
    lines = (PYCODE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
