"""Write the drafter in z-lab's layout, which TensorRT-LLM reads: `python zlab.py DIRECTORY`.

That layout has no reduced vocabulary: this drafter proposes any of the target's tokens, by the
target's own head, whose rows its own are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

OWN = Path(__file__).parent / "drafter"
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OF_FEWER_TOKENS = ("d2t", "t2d", "lm_head.weight")


def main(directory: Path) -> None:
    stored = json.loads((OWN / "config.json").read_text())
    config = stored.pop("transformer_layer_config")
    taps = [layer - 1 for layer in stored["aux_hidden_state_layer_ids"]]  # 0: the first layer's
    config |= {name: stored[name] for name in ("block_size", "dtype")}
    # where z-lab's MLX code and llama.cpp look for them
    inner = {name: stored[name] for name in ("mask_token_id", *DFLASH2)}
    config["dflash_config"] = {"target_layer_ids": taps, **inner}
    tensors = load_file(OWN / "model.safetensors")
    for name in OF_FEWER_TOKENS:
        del tensors[name]
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
