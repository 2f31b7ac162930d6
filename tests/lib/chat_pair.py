"""The demo pair as a chat model: it has no chat template of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pycode import PYCODE, demo_config

from dflash_trt.build.run import build
from dflash_trt.config import Source

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ opening or 'def ' }}{% endif %}"
)


def build_chat_pair(directory: Path, template: str = TEMPLATE) -> Path:
    """Builds it in `directory/pycode`, and returns that."""
    shutil.copytree(PYCODE / "target", directory / "target")
    file = directory / "target" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    config = demo_config()
    config = config.model_copy(update={"target": Source(path=directory / "target")})
    build(config, directory / "pycode", lambda *_: None)
    return directory / "pycode"
