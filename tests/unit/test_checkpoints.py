"""Reading checkpoints that transformers and z-lab's dflash wrote, and refusing the rest."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoints import (
    drafter_shapes,
    for_length,
    load_drafter,
    load_target,
    load_tokenizer,
    target_shapes,
    tokenizer_files,
)
from dflash_trt.checks import check_pair
from dflash_trt.errors import CheckpointError, PairError
from dflash_trt.weights import Weights
from tests.support.builds import edit, edit_weights
from tests.support.families import to_speculators
from tests.support.pairs import Pair, make_pair

Change = Callable[[dict[str, Any]], Any]


def check(pair: Path) -> None:
    check_pair(load_target(pair / "target"), load_drafter(pair / "drafter"), None)


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [("qwen3", True, "float32"), ("llama", False, "bfloat16"), ("llama", True, "float16")],
)
def test_specs_and_tensors_are_what_transformers_wrote(
    tmp_path: Path, family: Any, tied: bool, dtype: str
) -> None:
    pair = make_pair(tmp_path, family=family, tied=tied, dtype=dtype, kv_heads=1, taps=(0, 1, 2))
    target, drafter = load_target(pair.target_dir), load_drafter(pair.drafter_dir)
    check_pair(target, drafter, 7)
    assert target.spec.qk_norm is (family == "qwen3")
    assert target.spec.tie_word_embeddings is tied
    assert target.spec.eos_token_ids == (318,)
    assert {(x.num_key_value_heads, x.head_dim) for x in target.spec.layers} == {(1, 16)}
    assert target.spec.rms_norm_eps == (1e-6 if family == "qwen3" else 1e-5)
    assert (drafter.spec.block_size, drafter.spec.mask_token_id) == (8, 319)
    assert drafter.spec.target_layer_ids == (0, 1, 2)
    assert drafter.spec.layers[0].rope.theta == 50000.0
    assert drafter.weights.names == sorted(drafter_shapes(drafter.spec))
    model = AutoModelForCausalLM.from_pretrained(pair.target_dir, dtype=getattr(torch, dtype))
    state = model.state_dict()
    for name in target_shapes(target.spec):
        read = target.weights.read(name)
        assert read.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert np.array_equal(read.astype(np.float32), state[name].float().numpy())


def test_shards_are_read_like_one_file(pair: Path) -> None:
    whole = Weights(pair / "target")
    model = AutoModelForCausalLM.from_pretrained(pair / "target")
    model.save_pretrained(pair / "sharded", max_shard_size="20KB")
    shards = Weights(pair / "sharded")
    assert len(shards.files) > 3
    assert shards.names == whole.names
    for name in whole.names:
        assert shards.shape(name) == whole.shape(name)
        assert np.array_equal(shards.read(name), whole.read(name))
    index = pair / "sharded" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"] |= {"more": shards.files[1].name}
    index.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="lists tensor more, but its shard lacks it"):
        Weights(pair / "sharded")
    shards.files[1].unlink()
    with pytest.raises(CheckpointError, match=shards.files[1].name):
        Weights(pair / "sharded")


def test_of_a_tensor_in_two_shards_the_index_chooses(tmp_path: Path) -> None:
    for chosen in range(2):
        places = {"x": f"{chosen}.safetensors", "y": f"{1 - chosen}.safetensors"}
        for number in range(2):
            tensors = {"x": torch.full((2,), float(number))}
            tensors |= {"y": torch.ones(1)} if number != chosen else {}
            save_file(tensors, tmp_path / f"{number}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        assert Weights(tmp_path).read("x").tolist() == [chosen] * 2


def test_a_shard_outside_the_folder_is_refused(pair: Path) -> None:
    target = pair / "target"
    (target / "model.safetensors").rename(pair / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        Weights(target)


def test_reading_keeps_one_tensor_in_memory(pair: Path) -> None:
    def rss_kb() -> int:
        return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

    big = {f"t{i}": torch.ones(1 << 20) for i in range(32)}  # 4 MiB each
    save_file(big, pair / "model.safetensors")
    weights, before = Weights(pair), rss_kb()
    for name in weights.names:
        assert weights.read(name)[-1] == 1
    assert rss_kb() - before < 3 * 4096


@pytest.mark.parametrize("keep", [0, 100, -1])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_truncated_file_is_named(pair: Path, role: str, keep: int) -> None:
    file = pair / role / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        check(pair)


def test_pickles_are_never_loaded(pair: Path) -> None:
    (pair / "target" / "model.safetensors").rename(pair / "target" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pickled weights"):
        load_target(pair / "target")


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_missing_directory_is_named(pair: Path, role: str) -> None:
    shutil.rmtree(pair / role)
    with pytest.raises(CheckpointError, match=rf"cannot read .*{role}/config\.json: No such file"):
        check(pair)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config_is_named(pair: Path, text: str) -> None:
    (pair / "target" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"target/config\.json"):
        check(pair)


REFUSED = yaml.safe_load(Path(__file__).with_name("refused_checkpoints.yaml").read_text())


@pytest.mark.parametrize(
    "case", REFUSED["models"] + REFUSED["pairs"], ids=lambda case: case["says"]
)
def test_what_is_not_handled_is_refused(pair: Path, case: dict[str, Any]) -> None:
    edit(pair / case.get("role", "drafter"), **case["change"])
    error = PairError if case in REFUSED["pairs"] else CheckpointError
    with pytest.raises(error, match=case["says"]):
        check(pair)


@pytest.mark.parametrize(
    ("role", "change", "says"),
    [
        (
            "target",
            lambda t: t.pop("model.layers.3.mlp.up_proj.weight"),
            "no tensor model.layers.3",
        ),
        ("drafter", lambda t: t.pop("hidden_norm.weight"), "no tensor hidden_norm"),
        ("drafter", lambda t: t.pop("fc.weight"), "no tensor fc"),
        ("target", lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"is \[65\]"),
        ("drafter", lambda t: t.update({"layers.9.bias": torch.ones(4)}), "layers.9.bias"),
        ("target", lambda t: t.update({"model.norm.weight": torch.ones(64).double()}), "F64"),
    ],
)
def test_tensors_must_be_those_of_the_spec(
    pair: Path, role: str, change: Change, says: str
) -> None:
    edit_weights(pair / role, change)
    with pytest.raises(CheckpointError, match=says):
        check(pair)


def test_dflash_config_wins_over_top_level(pair: Path) -> None:
    own = {"mask_token_id": 5, "target_layer_ids": [2, 1], "block_size": 4}
    edit(pair / "drafter", dflash_config=own, block_size=8, mask_token_id=6)
    spec = load_drafter(pair / "drafter").spec
    assert (spec.block_size, spec.mask_token_id, spec.target_layer_ids) == (4, 5, (2, 1))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, (3, 4, 5, 318)),
        ({}, {"eos_token_id": [5], "text_config": {"eos_token_id": [6, 5]}}, (5, 6, 318)),
        (None, {"eos_token_id": 318}, (318,)),
        (None, {"eos_token_id": None}, (318,)),
    ],
)
def test_a_text_ends_with_what_any_file_names(
    pair: Path, generation: object, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    file = pair / "target" / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    edit(pair / "target", **config)
    assert load_target(pair / "target").spec.eos_token_ids == expected


ROPE = {"rope_theta": 10000.0, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "yarn", **ROPE, **ORIGINAL}, 1024),
        ({"type": "yarn", **ROPE}, 2048),
        ({"rope_type": "linear", **ROPE}, 2048),
        ({"rope_type": "dynamic", **ROPE, **ORIGINAL}, 2048),
        ({"rope_theta": 10000.0}, 512),
    ],
)
def test_a_scaled_model_reaches_as_far_as_vllm_says(
    pair: Path, rope: dict[str, Any], expected: int
) -> None:
    for fields in ({"rope_parameters": rope}, {"rope_parameters": None, "rope_scaling": rope}):
        edit(pair / "target", **fields)
        assert load_target(pair / "target").spec.max_position_embeddings == expected


def test_dynamic_rope_turns_slower_in_builds_for_longer_texts(pair: Path) -> None:
    """As vLLM's DynamicNTKScalingRotaryEmbedding; up to its original length nothing changes."""
    edit(pair / "target", rope_parameters={"rope_type": "dynamic", **ROPE})
    target = load_target(pair / "target")
    dim = target.layers[0].rope.dim
    thetas = [for_length(target, length).layers[0].rope.theta for length in (512, 513, 2048)]
    longer = 10000.0 * (4.0 * 2048 / 512 - 3.0) ** (dim / (dim - 2))
    assert thetas == pytest.approx([10000.0, longer, longer])


def test_the_tokenizer_is_loaded_and_its_faults_are_named(pair: Path) -> None:
    target = pair / "target"
    tokenizer = load_tokenizer(target)
    assert tokenizer.decode(tokenizer.encode("def f():\n").ids) == "def f():\n"
    assert [file.name for file in tokenizer_files(target)] == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        load_tokenizer(target)
    (target / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json") as caught:
        load_tokenizer(target)
    assert caught.value.fix.startswith("Write tokenizer.json there")


def test_what_can_be_done_without_a_tokenizer_is_said(pair: Path, tmp_path: Path) -> None:
    """A snapshot of the Hub is not to be written to; of Kimi's, code would make the tokenizer."""
    snapshot = tmp_path / "snapshots" / "c"
    shutil.copytree(pair / "target", snapshot)
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files(snapshot)
    assert caught.value.fix.startswith("Take a copy of the model")
    code = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(code))
    with pytest.raises(CheckpointError, match="has code for a tokenizer") as caught:
        tokenizer_files(snapshot)
    assert "`dflash-trt export vllm CONFIG`" in caught.value.fix


@pytest.mark.parametrize("name", ["pycode", "smollm2"])
def test_the_examples_drafters_are_read(name: str) -> None:
    """One is in z-lab's format, one a DFlash 2 with a selector over a reduced vocabulary."""
    drafter = load_drafter(Path(__file__).parents[2] / "examples" / name / "drafter")
    assert drafter.spec.block_size == 8
    assert (drafter.spec.selector is None) == (name == "pycode")


# what changes a draft, by the code that reads it: a value, and what it makes of the spec
# (None: it is refused by its name)
FIELDS: dict[str, tuple[Any, tuple[str, Any] | None]] = {
    # z-lab's model.py and model_mlx.py
    "block_size": (5, ("block_size", 5)),
    "final_logit_softcapping": (30.0, ("final_logit_softcapping", 30.0)),
    "input_embedding_scale": (8.0, ("embedding_scale", 8.0)),
    "mask_token_id": (3, ("mask_token_id", 3)),
    "num_target_layers": (9, ("num_target_layers", 9)),
    "output_multiplier": (0.5, ("output_multiplier", 0.5)),
    "rms_norm_eps": (1e-3, ("rms_norm_eps", 1e-3)),
    "target_layer_ids": ([0, 2], ("target_layer_ids", (0, 2))),
    "conv_kernel_size": (4, None),  # of DFlash 2 alone
    "selector_rank": (8, None),
    # vLLM's qwen3_dflash.py, and its forks
    "add_swa_attention_sink_bias": (True, None),
    "conv_kernel_conditioning": ("token", None),
    "eagle_aux_hidden_state_layer_ids": ([1, 2], None),
    "is_neox_style": (False, None),
    "use_aux_hidden_state": (False, None),
    # SGLang's dflash_utils.py and speculators' DFlashSpeculatorConfig
    "query_zero_predicts_next": (True, ("sample_from_anchor", True)),
    "sample_from_anchor": (True, ("sample_from_anchor", True)),
    "sliding_window_non_causal": (True, None),
    # others' fine-tunes
    "attention_value_scale": (2.0, None),
    "logit_scale": (2.0, None),
    "shift_label": (True, None),
}


@pytest.mark.parametrize("nested", [False, True], ids=["beside", "in dflash_config"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_changes_drafts_is_honored_or_refused(
    pair: Path, name: str, nested: bool
) -> None:
    value, honored = FIELDS[name]
    file = pair / "drafter" / "config.json"
    config = json.loads(file.read_text())
    inner = config["dflash_config"]
    # what is nested has precedence, and decoder's fields stand beside
    place = inner if name in inner or (nested and name not in config) else config
    place[name] = value
    file.write_text(json.dumps(config))
    if honored is None:
        with pytest.raises(CheckpointError, match=name):
            load_drafter(pair / "drafter")
        return
    field, expected = honored
    assert getattr(load_drafter(pair / "drafter").spec, field) == expected


@pytest.mark.parametrize("name", ["causal", "is_causal", "use_swa", "output_multiplier"])
def test_what_only_the_other_layout_reads_is_refused_in_speculators(
    tmp_path: Path, pair: Path, name: str
) -> None:
    written = Pair(pair / "target", pair / "drafter")
    to_speculators(written, tmp_path / "speculators", ids=range(320), from_anchor=False)
    file = tmp_path / "speculators" / "config.json"
    config = json.loads(file.read_text())
    config["transformer_layer_config"][name] = 0.5 if name == "output_multiplier" else True
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=name):
        load_drafter(tmp_path / "speculators")


def test_a_block_that_drafts_from_its_anchor_has_a_draft_more(pair: Path) -> None:
    before = load_drafter(pair / "drafter").spec
    edit(pair / "drafter", sample_from_anchor=True)
    after = load_drafter(pair / "drafter").spec
    assert after.block_size == before.block_size + 1
