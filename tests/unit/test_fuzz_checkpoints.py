"""Whatever stands in a config.json, the answer is ours, and memory stays bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import DFLASH2, OWN, TARGET
from pairs import make_pair
from transformers import (
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

pytestmark = pytest.mark.models

CASES = 1200
SHAPE = TARGET | {"sliding_window": 8}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0}
TARGETS: dict[str, PretrainedConfig] = {
    "GptOssForCausalLM": GptOssConfig(**SHAPE, **EXPERTS),
    "Qwen3MoeForCausalLM": Qwen3MoeConfig(**SHAPE, **EXPERTS, moe_intermediate_size=32),
    "Gemma3ForConditionalGeneration": Gemma3Config(text_config=SHAPE),
    "Qwen2ForCausalLM": Qwen2Config(**SHAPE, use_sliding_window=True, max_window_layers=2),
    "MistralForCausalLM": MistralConfig(**SHAPE),
    "LlamaForCausalLM": LlamaConfig(**SHAPE, rope_parameters=YARN),
}
WINDOWS = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 9}


def drafters(zlab: dict[str, object]) -> dict[str, dict[str, object]]:
    """z-lab's layout with windows and DFlash2's fields, and the speculators format."""
    layer = Qwen3Config(**SHAPE | {"num_hidden_layers": 1}).to_dict()
    return {
        "1-windows": zlab | WINDOWS | {"is_causal": False, "rope_parameters": YARN},
        "2-dflash2": zlab
        | {"architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH2["dflash_config"] | OWN},
        "3-speculators": {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": layer,
            "draft_vocab_size": 320,
            "block_size": 8,
            "mask_token_id": 319,
            "aux_hidden_state_layer_ids": [1, 3],
            "sample_from_anchor": False,
            "speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}},
        },
    }


@pytest.mark.parametrize("seed", [0])
def test_any_config_gives_an_answer_of_ours(tmp_path: Path, seed: int) -> None:
    pair = make_pair(tmp_path)
    for role, directory in (("target", pair.target_dir), ("drafter", pair.drafter_dir)):
        (tmp_path / "configs" / role).mkdir(parents=True)
        sound = json.loads((directory / "config.json").read_text())
        configs = {"0": sound}
        if role == "drafter":
            configs |= drafters(sound)
        else:
            configs |= {
                name: config.to_dict() | {"architectures": [name]}
                for name, config in TARGETS.items()
            }
        for name, config in configs.items():
            (tmp_path / "configs" / role / f"{name}.json").write_text(json.dumps(config))
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).parents[1] / "lib/fuzz_configs.py",
            tmp_path,
            str(seed),
            str(CASES),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found = json.loads(done.stdout)
    assert not found["unexpected"], found["unexpected"][:3]
    came = found["came"]
    assert came["target"] + came["target refused"] == CASES
    assert came["drafter"] + came["drafter refused"] == CASES
    # the cases mean something: enough of them get far, enough are refused
    assert (
        min(came["pair"], came["pair refused"], came["text"], came["target refused"]) > CASES / 20
    )
