"""Drafters in every form in use, against z-lab's `dflash`."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import built_from
from exact import (
    Case,
    assert_drafter_logits,
    assert_same_text_and_same_rounds,
    case_for,
)
from pairs import write_pair
from transformers import LlamaConfig

pytestmark = pytest.mark.models

TARGET = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
DRAFTER = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 10,
    "max_window_layers": 0,
}
FORMS: dict[str, dict[str, Any]] = {
    "sliding-causal": SLIDING,
    # smaller than the block, so that it cuts both ways
    "sliding-not-causal": SLIDING | {"sliding_window": 4, "is_causal": False},
    "all-causal": SLIDING | {"is_causal": True},
    # as gpt-oss's drafters
    "biases and YaRN, all in dflash_config": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "block_size": None,
        "dflash_config": DRAFTER["dflash_config"] | {"block_size": 6},
    },
    "scales, all at top level": {
        "dflash_config": {},
        **DRAFTER["dflash_config"],
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.6,
        "final_logit_softcapping": 7.0,
    },
}


@pytest.fixture(scope="module", params=FORMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    pair = write_pair(directory, LlamaConfig(**TARGET), DRAFTER | FORMS[request.param])
    return case_for(built_from(pair, directory))


def test_drafter_logits(case: Case) -> None:
    assert_drafter_logits(case)


def test_same_text_and_same_rounds(case: Case) -> None:
    assert_same_text_and_same_rounds(case)
