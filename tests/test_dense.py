"""Dense target families and RoPE kinds, against `transformers`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_trt.checkpoints.fields import rope
from dflash_trt.graphs.rope import inverse_frequencies

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 128},
    "yarn-gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        ORIGINAL: 16,
    },
    "yarn-kimi": {
        "rope_type": "yarn",
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        ORIGINAL: 64,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1 + i / 8 for i in range(16)],
        "long_factor": [9.0] * 16,
        ORIGINAL: 128,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", ROPES)
def test_rope_is_that_of_transformers(name: str, theta: float) -> None:
    """In transformers 5's spelling and in the one before."""
    parameters = ROPES[name]
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    model = LlamaConfig(
        **shape, max_position_embeddings=512, rope_parameters=parameters | {"rope_theta": theta}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](copy.deepcopy(model))
    old = {"type" if key == "rope_type" else key: value for key, value in parameters.items()}
    for config in (
        {"rope_parameters": parameters | {"rope_theta": theta}},
        {"rope_theta": theta, "rope_scaling": old},
    ):
        config["max_position_embeddings"] = 512
        read = rope(Path("config.json"), config, "full_attention", 32)
        assert read.attention_factor == factor
        np.testing.assert_allclose(inverse_frequencies(read), expected, rtol=3e-7, atol=0)
