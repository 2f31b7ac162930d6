"""Dense target families and RoPE kinds, against `transformers`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import built_from
from exact import (
    Case,
    assert_build_and_verify,
    assert_drafter_logits,
    assert_same_text_and_same_rounds,
    assert_target_logits_and_taps,
    case_for,
    rounds_of,
    run_all,
    scheduler_of,
)
from op_profile import assert_in_profile
from pairs import write_pair
from safetensors.numpy import save_file
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_trt.checkpoints import load_target
from dflash_trt.checkpoints.families.gemma4 import gemma4
from dflash_trt.checkpoints.fields import Config, decoder_fields, rope
from dflash_trt.decoding import Request
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.errors import CheckpointError
from dflash_trt.graphs.rope import inverse_frequencies

pytestmark = pytest.mark.models

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
        read = rope(Config(Path("config.json"), config), "full_attention", 32)
        assert read.attention_factor == factor
        np.testing.assert_allclose(inverse_frequencies(read), expected, rtol=3e-7, atol=0)


def test_longrope_ends_where_its_frequencies_change() -> None:
    shape = SHAPE | {"head_dim": 32}
    config = LlamaConfig(**shape, rope_parameters=ROPES["longrope"] | {"rope_theta": 1e4})
    fields = decoder_fields(Config(Path("config.json"), config.to_dict()))
    assert fields["max_position_embeddings"] == ROPES["longrope"][ORIGINAL]


SHAPE = {
    "vocab_size": 320,
    "hidden_size": 96,  # its root is no round number: Gemma scales by it
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
HEADS = {"head_dim": 16}
DRAFTER = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
}
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 10}
GEMMA = SHAPE | HEADS | ALTERNATE | {"query_pre_attn_scalar": 24}
GEMMA3 = GEMMA | {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": ROPES["linear"] | {"rope_theta": 1e6},
    }
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA4 = SHAPE | HEADS | ALTERNATE | {"hidden_size_per_layer_input": 0, "global_head_dim": 32}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(
        **SHAPE, **HEADS, rope_parameters=ROPES["llama3"] | {"rope_theta": 1e4}
    ),
    # half of the layers with a window, by the fields that were there before layer_types
    "qwen2": lambda: Qwen2Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=10,
        max_window_layers=2,
        rope_parameters=ROPES["yarn"] | {"rope_theta": 1e4},
    ),
    "mistral": lambda: MistralConfig(**SHAPE, **HEADS, sliding_window=10),
    "gemma2": lambda: Gemma2Config(
        **GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=20.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA3, final_logit_softcapping=20.0),
    "gemma3-with-vision": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(**GEMMA3), vision_config=VISION
    ),
    "gemma4": lambda: Gemma4TextConfig(**GEMMA4, final_logit_softcapping=20.0),
    # as the 31B: keys that are values too, and fewer of them, in the layers without a window
    "gemma4-31b": lambda: Gemma4Config(
        text_config=Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1)
    ),
}

# as the drafters published for Gemma 4, which scale the embedding as the target does
GEMMA4_DRAFTER = DRAFTER | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 0,
    "dflash_config": {
        "mask_token_id": 4,
        "target_layer_ids": [0, 1, 2],
        "input_embedding_scale": 96**0.5,
        "final_logit_softcapping": 20.0,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    dtype = "bfloat16" if request.param == "gemma3-with-vision" else "float32"
    drafter = GEMMA4_DRAFTER if request.param == "gemma4-31b" else DRAFTER
    pair = write_pair(directory, FAMILIES[request.param](), drafter, dtype=dtype)
    return case_for(built_from(pair, directory), new_tokens=64)


def test_target_logits_and_taps(case: Case) -> None:
    assert_target_logits_and_taps(case)


def test_drafter_logits(case: Case) -> None:
    """With the target's embedding as it is stored and its head."""
    assert_drafter_logits(case)


def test_same_text_and_same_rounds(case: Case) -> None:
    assert_same_text_and_same_rounds(case)


def test_same_texts_side_by_side(case: Case) -> None:
    """In one batch, at different positions, with prompts that go in by chunks."""
    scheduler = scheduler_of(rounds_of(case.built), Fixed(7), prefill_chunk=7)
    sequences = run_all(scheduler, [Request(prompt, 64) for prompt in case.prompts])
    assert [sequence.tokens for sequence in sequences] == case.greedy


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_graph_stays_in_the_profile(case: Case, role: str) -> None:
    engine = case.built.target_engine if role == "target" else case.built.drafter_engine
    assert_in_profile(engine / "model.onnx")


def test_build_and_verify(case: Case, tmp_path: Path) -> None:
    assert_build_and_verify(case, tmp_path)


# what published config.json files say, in the order and spelling of their time
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        # as its model card says for long texts
        "rope_scaling": {"factor": 4.0, ORIGINAL: 32768, "type": "yarn"},
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "gemma-2-27b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
    },
    # before transformers wrote per_layer_config
    "gemma-4-31B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {
            "attention_k_eq_v": True,
            "enable_moe_block": False,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 5376,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504,
            "max_position_embeddings": 262144,
            "model_type": "gemma4_text",
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
            "num_kv_shared_layers": 0,
            "rms_norm_eps": 1e-06,
            "sliding_window": 1024,
            "vocab_size": 262144,
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    spec = load_target(tmp_path).spec
    model = AutoConfig.from_pretrained(tmp_path).get_text_config()
    for field in ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(spec, field) == getattr(model, field)
    assert spec.tie_word_embeddings == model.tie_word_embeddings
    assert spec.final_logit_softcapping == getattr(model, "final_logit_softcapping", None)
    assert spec.attn_logit_softcapping == getattr(model, "attn_logit_softcapping", None)
    if hasattr(model, "query_pre_attn_scalar"):
        assert spec.attention_scale == model.query_pre_attn_scalar**-0.5
    window = getattr(model, "sliding_window", None)
    kind = "sliding_attention" if window else "full_attention"
    kinds = getattr(model, "layer_types", [kind] * model.num_hidden_layers)
    for i, (layer, kind) in enumerate(zip(spec.layers, kinds, strict=True)):
        one = model.per_layer_config[i] if model.is_heterogeneous else model
        head_dim = getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads
        assert layer.window == (window if kind == "sliding_attention" else None)
        heads = (layer.num_key_value_heads, layer.head_dim, layer.intermediate_size)
        assert heads == (one.num_key_value_heads, head_dim, one.intermediate_size)
        parameters = model.rope_parameters
        parameters = parameters.get(kind, parameters)
        assert layer.rope.kind == parameters["rope_type"]
        assert layer.rope.theta == parameters["rope_theta"]
        for field in layer.rope.parameters.keys() & parameters.keys():
            assert layer.rope.parameters[field] == parameters[field]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ],
)
def test_what_gemma_4_has_beside_is_refused_by_name(change: dict[str, object], says: str) -> None:
    config = Gemma4TextConfig(**GEMMA4).to_dict()
    with pytest.raises(CheckpointError, match=says):
        gemma4(Config(Path("config.json"), config | change))
