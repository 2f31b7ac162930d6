"""Every target family and every form of a drafter, against `transformers` and z-lab's `dflash`."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig, Gemma3TextConfig, Gemma4TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_trt.checkpoints import load_target
from dflash_trt.checkpoints.fields import Config, decoder_fields, rope
from dflash_trt.checkpoints.target import gemma3, gemma4
from dflash_trt.errors import CheckpointError
from dflash_trt.graphs.positions import inverse_frequencies
from tests.support.equality import (
    Case,
    assert_drafter_logits,
    assert_same_text_and_same_rounds,
    assert_target_logits_and_taps,
)
from tests.support.families import DENSE, FORMS, GEMMA4, HYBRIDS, MOE, ORIGINAL, ROPES, WIDE
from tests.support.op_profile import assert_in_profile

pytestmark = pytest.mark.models


@pytest.mark.parametrize("case", [*DENSE, *MOE, *HYBRIDS], indirect=True)
def test_target_logits_and_taps(case: Case) -> None:
    assert_target_logits_and_taps(case)


@pytest.mark.parametrize("case", [*DENSE, *FORMS, "dflash2"], indirect=True)
def test_drafter_logits(case: Case) -> None:
    assert_drafter_logits(case)


@pytest.mark.parametrize("case", [*DENSE, *MOE, *HYBRIDS, *FORMS, "dflash2"], indirect=True)
def test_same_text_and_same_rounds(case: Case) -> None:
    assert_same_text_and_same_rounds(case)


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("case", [*DENSE, "dflash2"], indirect=True)
def test_graph_stays_in_the_profile(case: Case, role: str) -> None:
    assert_in_profile(case.built.target_engine.parent / role / "model.onnx")


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", ROPES)
def test_rope_is_that_of_transformers(name: str, theta: float) -> None:
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
    shape = WIDE | {"head_dim": 32}
    config = LlamaConfig(**shape, rope_parameters=ROPES["longrope"] | {"rope_theta": 1e4})
    fields = decoder_fields(Config(Path("config.json"), config.to_dict()))
    assert fields["max_position_embeddings"] == ROPES["longrope"][ORIGINAL]


# what published config.json files say, in the order and spelling of their time
PUBLISHED = sorted((Path(__file__).parents[1] / "samples" / "configs").glob("*.json"))


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda file: file.stem)
def test_a_published_config_is_read_as_by_transformers(config: Path, tmp_path: Path) -> None:
    shutil.copy(config, tmp_path / "config.json")
    save_file({"model.norm.weight": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    spec = load_target(tmp_path).spec
    model = AutoConfig.from_pretrained(tmp_path).get_text_config()
    for field in ("vocab_size", "hidden_size", "rms_norm_eps"):
        assert getattr(spec, field) == getattr(model, field)
    scaled = getattr(model, "rope_parameters", {}).get("original_max_position_embeddings")
    longest = model.max_position_embeddings
    if scaled and model.rope_parameters["rope_type"] == "yarn":  # as vLLM derives it
        longest = max(longest, int(scaled * model.rope_parameters["factor"]))
    assert spec.max_position_embeddings == longest
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


@pytest.mark.parametrize("value", [True, "vision"])
def test_gemma_3_that_looks_ahead_is_refused(value: object) -> None:
    config = Gemma3TextConfig(use_bidirectional_attention=False).to_dict()
    gemma3(Config(Path("config.json"), config))
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        gemma3(Config(Path("config.json"), config | {"use_bidirectional_attention": value}))
