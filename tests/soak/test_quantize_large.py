"""Targets with the sizes of Qwen3-32B, of holes: memory is that of a layer at every depth.

    [LAYERS=4,64] [METHOD=w4a16] pytest -m soak -s tests/soak/test_quantize_large.py

prints the seconds and bytes of docs/tensorrt_llm.md. All 64 layers take 67 GB of holes, and write
33 GB.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from hole_targets import peak_memory, write_target
from transformers import Qwen3Config

pytestmark = pytest.mark.soak
DEPTHS = [int(each) for each in os.environ.get("LAYERS", "4,16").split(",")]
METHOD = os.environ.get("METHOD", "fp8")


def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    assert len(DEPTHS) > 1  # one depth shows no growth
    peaks = []
    for depth in DEPTHS:
        config = Qwen3Config(
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=depth,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=False,
        )
        target, output = tmp_path / "target", tmp_path / "out" / "target"
        of_layer = write_target(target, config)
        started = time.monotonic()
        peaks.append(peak_memory(METHOD, target, output))
        of_all = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        print(
            f"\n{METHOD}, {depth} layers of {of_layer / 1e9:.2f} GB, {of_all / 1e9:.1f} GB: "
            f"{time.monotonic() - started:.0f} s, {peaks[-1] / 1e9:.2f} GB"
        )
        shutil.rmtree(target)
        shutil.rmtree(output.parent)
    assert peaks[-1] - peaks[0] < of_layer, peaks
