"""Chat templates that show tools and write calls as published ones do (`tool_templates.yaml`)."""

from pathlib import Path

import yaml

from dflash_trt.chat.render import Render
from dflash_trt.chat.templates import Template

TEMPLATES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WRITING: dict[str, str] = TEMPLATES["writing"]
CHATML, NO_SYSTEM, UNKNOWN, AS_TEXT = (
    TEMPLATES[name] for name in ("chatml", "no_system", "unknown", "as_text")
)


def renderer(source: str) -> Render:
    template = Template(source)
    return lambda **values: template(bos_token="<s>", eos_token="</s>", **values)
