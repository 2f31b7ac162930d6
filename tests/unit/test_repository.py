"""The model repository that a build writes, without a server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import np_to_triton_dtype

from dflash_trt.builder.repository import MODELS, TEMPLATES, read_config, write_repository
from dflash_trt.checkpoints import DrafterSpec, LayerSpec, Rope, TargetSpec
from dflash_trt.config import BuildConfig
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Candidates,
    Copy,
    DraftResult,
    Features,
    Logprobs,
    Round,
    RoundSequence,
    SamplingParams,
    SequenceResult,
)
from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.decoding.messages import Anchor, DrafterInput, VerifyResult
from dflash_trt.decoding.packing import (
    DraftInputTensors,
    DraftTensors,
    RoundResultTensors,
    RoundTensors,
    VerifyTensors,
    pack_drafts,
    pack_round,
    pack_verified,
)
from dflash_trt.serving.answer import OUTPUTS
from dflash_trt.wire import Settings
from tests.unit.test_chat import _tokenizer

LAYER = LayerSpec(
    num_key_value_heads=2, head_dim=16, rope=Rope(theta=10000.0, dim=16), intermediate_size=96
)
DECODER = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "layers": (LAYER,) * 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
TARGET = TargetSpec(**DECODER, model_type="qwen3", tie_word_embeddings=True, eos_token_ids=(318, 7))
DRAFTER = DrafterSpec(
    **DECODER, block_size=8, mask_token_id=319, target_layer_ids=(0, 2), num_target_layers=4
)


def _write(directory: Path, **sections: dict) -> Path:
    source = {"path": directory}
    sections["serving"] = {"max_seq_len": 200, **sections.get("serving", {})}
    config = BuildConfig(name="tiny", target=source, drafter=source, **sections)
    write_repository(directory, config, TARGET, DRAFTER.block_size)
    return directory / "model_repository"


def _names(tensors) -> list[str]:
    return [tensor.name for tensor in tensors]


def _fields(cls: type) -> set[str]:
    return set(cls._fields)  # type: ignore[attr-defined]


def test_every_model_has_its_config_and_version(tmp_path: Path) -> None:
    repository = _write(tmp_path)
    for model in MODELS:
        config = read_config(repository / model / "config.pbtxt")
        assert config.name == model
        assert config.max_batch_size == 0
        # in Triton 2.51 a queue policy makes the batcher sleep up to 500 ms
        assert not config.HasField("scheduling_choice") or config.HasField("ensemble_scheduling")
        assert any((repository / model / "1").iterdir())


def test_parameters_say_what_the_build_knows(tmp_path: Path) -> None:
    serving = {"slots": 3, "max_queue": 5}
    repository = _write(tmp_path, serving=serving, speculation={"draft_tokens": 4})

    def parameters(model: str) -> dict[str, str]:
        found = read_config(repository / model / "config.pbtxt").parameters
        return {key: value.string_value for key, value in found.items()}

    settings = Settings.from_parameters(parameters("dflash"))
    assert settings == Settings(
        tokenizer="../../tokenizer",
        engines="../../engines",
        mode="ensemble",
        eos_token_ids=frozenset({7, 318}),
        slots=3,
        max_queue=5,
        max_seq_len=200,
        prefill_chunk=256,
        block_size=8,
        speculation=Speculation(draft_tokens=4),
        prefix_cache=1024,
    )
    other = settings.model_copy(update={"eos_token_ids": frozenset(), "sampling": {"top_p": 0.5}})
    assert Settings.from_parameters(other.to_parameters()) == other
    # relative to the model's folder, so that a built directory can be moved
    for model, engine in (("verify", "target"), ("draft", "drafter")):
        path = repository / model / parameters(model)["engine"]
        assert path.resolve() == (tmp_path / "engines" / engine).resolve()


GIVEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
GIVEN |= {"repetition_penalty": 1.05, "max_new_tokens": 2048, "eos_token_id": 1}
KNOWN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
KNOWN |= {"repetition_penalty": 1.05, "max_tokens": 2048}


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [
        ("model", GIVEN, KNOWN),
        ("none", GIVEN, {}),
        ("model", {"temperature": None, "top_k": -1}, {"top_k": 0}),
        ("model", {}, {}),
        ("model", {"temperature": "hot", "top_p": 0.5}, {}),  # a warning of the target's checks
    ],
)
def test_sampling_defaults_are_those_that_vllm_takes(
    asked: str, given: dict[str, object], expected: object, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "generation_config.json").write_text(json.dumps(given))
    repository = _write(tmp_path, serving={"sampling_defaults": asked})
    found = read_config(repository / "dflash" / "config.pbtxt").parameters
    assert json.loads(found["sampling"].string_value) == expected


def test_in_process_has_the_public_models_only(tmp_path: Path) -> None:
    repository = _write(tmp_path, serving={"mode": "in_process"})
    assert {path.name for path in repository.iterdir()} == {"dflash", "dflash_infer"}


def test_tensors_are_the_fields_of_the_tuples() -> None:
    def config(model: str):
        return read_config(TEMPLATES / model / "config.pbtxt")

    assert set(_names(config("verify").input)) == {"key"} | _fields(RoundTensors)
    assert set(_names(config("verify").output)) == _fields(VerifyTensors)
    assert set(_names(config("draft").input)) == {"key"} | _fields(DraftInputTensors)
    assert set(_names(config("draft").output)) == _fields(DraftTensors)
    assert set(_names(config("draft_verify").input)) == {"key"} | _fields(RoundTensors)
    assert set(_names(config("draft_verify").output)) == _fields(RoundResultTensors)
    names = [output.name for output in OUTPUTS.values()]
    assert _names(config("dflash").output) == names
    assert config("dflash").model_transaction_policy.decoupled


def _packed() -> dict[str, Any]:
    """Return the tensors of a round of two texts in which all that can be there is there."""
    processor = LogitsProcessor(SamplingParams(logprobs=1, include_drafting=True), 4, (95,))
    mask = np.ones(3, np.int32)
    row = RoundSequence([4, 5, 6], 1, 9, 3, 2, processor, [1, 2], next_token=7, masks=[mask] * 3)
    round = Round(0, [row] * 2, Features.DRAFT, 2, 3, [Copy(0, 1, 2, 3)] * 2)
    logprobs = Logprobs(np.ones((2, 2), np.float32), np.ones((2, 2), np.int64))
    result = SequenceResult(1, 7, logprobs=logprobs, draft_logprobs=[0.5, 0.5])
    taken = DrafterInput(np.ones((2, 3, 4), np.float32), [Anchor(7, 30, 28, 5)] * 2)
    drafted = Candidates(np.ones((2, 3), np.int64), np.ones((2, 9), np.float32))
    return {
        "key": np.ones(2, np.int64),
        **pack_round(round)._asdict(),
        **pack_verified(VerifyResult([result] * 2, 0.5, taken))._asdict(),
        **pack_drafts(DraftResult([drafted] * 2, 0.5), 2)._asdict(),
    }


@pytest.mark.parametrize("model", ["verify", "draft", "draft_verify"])
def test_tensors_fit_the_configs(model: str) -> None:
    config = read_config(TEMPLATES / model / "config.pbtxt")
    packed = {name: np.atleast_1d(value) for name, value in _packed().items()}
    for tensor in (*config.input, *config.output):
        array = packed[tensor.name]
        widths = zip(tensor.dims, array.shape, strict=True)
        assert all(width in (-1, size) for width, size in widths), f"{tensor.name} of {model}"
        kind = model_config_pb2.DataType.Name(tensor.data_type)
        kind = kind.removeprefix("TYPE_").replace("STRING", "BYTES")
        assert np_to_triton_dtype(array.dtype) == kind, f"{tensor.name} of {model}"


def test_texts_end_at_the_end_of_a_turn_too(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    _tokenizer(tmp_path / "tokenizer", template)
    config = read_config(_write(tmp_path) / "dflash" / "config.pbtxt")
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    assert Settings.from_parameters(parameters).eos_token_ids == {*TARGET.eos_token_ids, 1}
