"""Drafters in GGUF files: what is read of them against the safetensors drafter."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from dflash_trt.builder.export import export
from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import load_drafter, load_target, locate_argument
from dflash_trt.checks import check_pair, inspect
from dflash_trt.config import BuildConfig, Source, load_config
from dflash_trt.decoding import Request
from dflash_trt.errors import CheckpointError, ConfigError, PairError
from dflash_trt.speculation import Fixed
from dflash_trt.weights.gguf import as_directory
from tests.exact.test_gguf_families import MODELS
from tests.support import families, gguf_drafters, ggufs
from tests.support.builds import build_engines
from tests.support.built_pairs import MAX_SEQ_LEN, SLOTS, BuiltPair
from tests.support.equality import rounds_of, run_all, scheduler_of
from tests.support.pairs import Pair, make_pair, teach, write_pair

quiet: Callable[..., None] = lambda *_: None  # noqa: E731
PLAIN = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TARGETS: dict[str, Callable[[], PretrainedConfig]] = {
    **{
        name: partial(config, **families.TARGET, tie_word_embeddings=name != "qwen3")
        for name, config in PLAIN.items()
    },
    **MODELS,
}
YARN = families.YARN | {"rope_theta": 5e4, "factor": 4.0, families.ORIGINAL: 128}
OWN_FORMS: dict[str, dict[str, Any]] = {
    **{name: fields for name, fields in families.FORMS.items() if "YaRN" not in name},
    "yarn": {"attention_bias": True, "rope_parameters": YARN | {"truncate": True}},
    "reduced": {},  # a head of its own with some tokens, and a draft from the anchor's row
}
ALL_FORMS = [*families.FORMATS, *OWN_FORMS]
QUICK = ("z-lab", "dflash2", "reduced")
forms = pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=[] if f in QUICK else pytest.mark.models) for f in ALL_FORMS],
)


def pair_in_form(form: str, directory: Path) -> Pair:
    if form in families.FORMATS:
        return families.pair_of("qwen3", form, directory)
    pair = write_pair(directory, TARGETS["qwen3"](), families.DRAFTER | OWN_FORMS[form])
    return reduced(pair, directory) if form == "reduced" else pair


def reduced(pair: Pair, directory: Path) -> Pair:
    drafter = directory / "reduced"
    families.to_speculators(pair, drafter, from_anchor=True, ids=range(0, 320, 2))
    return Pair(pair.target_dir, drafter)


def rounded(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec as a GGUF file can state it: numbers in float32, and no number of layers."""
    stated = json.loads(json.dumps(spec), parse_float=lambda text: float(np.float32(text)))
    return {**stated, "num_target_layers": None}


@forms
def test_spec_and_tensors_are_those_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    pair = pair_in_form(form, tmp_path)
    file = gguf_drafters.write(tmp_path / "d.gguf", pair.drafter_dir, pair.target_dir)
    own, read = load_drafter(pair.drafter_dir), load_drafter(as_directory(file))
    assert rounded(asdict(read.spec)) == rounded(asdict(own.spec))
    assert read.weights.names == [name for name in own.weights.names if name != "t2d"]
    for name in read.weights.names:
        assert np.array_equal(read.weights.read(name), own.weights.read(name)), name
    check_pair(load_target(pair.target_dir), read, None)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "z-lab"),
        *[
            pytest.param(family, form, marks=pytest.mark.models)
            for family in TARGETS
            for form in families.FORMATS
            if (family, form) != ("llama", "z-lab")
        ],
    ],
)
def test_texts_and_rounds_are_those_of_the_checkpoints(
    tmp_path: Path, family: str, form: str
) -> None:
    """Of a pair in two GGUF files, whose drafts are accepted at every length."""
    kind = DFlash2DraftModel if form == "dflash2" else DFlashDraftModel
    pair = write_pair(tmp_path, TARGETS[family](), families.FORMATS[form], drafter_class=kind)
    texts = teach(pair)
    if form == "speculators":
        families.to_speculators(pair, tmp_path / form, from_anchor=False, ids=range(320))
        pair = Pair(pair.target_dir, tmp_path / form)
    assert_same_rounds(pair, texts, tmp_path)


@pytest.mark.models
@pytest.mark.parametrize("form", OWN_FORMS)
def test_rounds_of_every_form(tmp_path: Path, form: str) -> None:
    pair = write_pair(tmp_path, TARGETS["qwen3"](), families.DRAFTER | OWN_FORMS[form])
    texts = teach(pair, first=0 if form == "reduced" else 1)
    pair = reduced(pair, tmp_path) if form == "reduced" else pair
    assert_same_rounds(pair, texts, tmp_path)


def assert_same_rounds(pair: Pair, texts: list[list[int]], directory: Path) -> None:
    target = as_directory(ggufs.write(directory / "t.gguf", pair.target_dir))
    drafter = as_directory(gguf_drafters.write(directory / "d.gguf", pair.drafter_dir, target))
    sources = {"checkpoints": (pair.target_dir, pair.drafter_dir), "gguf": (target, drafter)}
    seen = []
    for name, directories in sources.items():
        engines = directory / name
        models = build_engines(*directories, engines, slots=SLOTS, max_seq_len=MAX_SEQ_LEN)
        built = BuiltPair(pair, texts, *models, engines / "target", engines / "drafter")
        seen.append(committed(built))
    assert seen[0] == seen[1]
    assert max(count for _, rounds in seen[0] for count in rounds) > 2


def committed(built: BuiltPair) -> list[tuple[list[int], list[int]]]:
    scheduler = scheduler_of(rounds_of(built), Fixed(built.drafter.spec.block_size - 1))
    requests = [Request(text[: 12 + 3 * i], 40) for i, text in enumerate(built.texts[:4])]
    sequences = [run_all(scheduler, [request])[0] for request in requests]
    return [(sequence.tokens, sequence.committed_per_round) for sequence in sequences]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def written(pair: Pair, file: Path, **options: Any) -> Path:
    return gguf_drafters.write(file, pair.drafter_dir, pair.target_dir, **options)


def test_a_build_takes_files_and_packages(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packed_drafter"
    package.mkdir()
    (package / "__init__.py").touch()
    file = written(pair, package / "tiny.gguf", kind=Kind.Q8_0)
    monkeypatch.syspath_prepend(tmp_path)
    target = f"name: tiny\ntarget: {{path: {pair.target_dir}}}\n"
    for source, expected in (
        (f"{{gguf: {file}}}", Source(gguf=file)),
        ("{package: packed_drafter, gguf: tiny.gguf}", None),
    ):
        (tmp_path / "tiny.yaml").write_text(f"{target}drafter: {source}\n")
        config = load_config(tmp_path / "tiny.yaml")
        assert expected in (None, config.drafter)
        manifest = build(config, tmp_path / "built", quiet).manifest
        assert manifest["inputs"]["drafter"].keys() >= {"config.json", "model.gguf"}
        holds = [] if expected else ["drafter"]
        assert [*manifest["packages"]] == holds
    report = inspect(pair.target_dir, locate_argument(str(file), "drafter", quiet, tmp_path))
    assert report["drafter"]["directory"] == str(file)
    assert report["drafter"]["format"] == "GGUF"
    assert report["drafter"]["weights"]["tensors"] == {"Q8_0": 8, "F32": 6}
    assert "error" not in [check["result"] for check in report["checks"]]
    reasons = {kind["kind"]: " ".join(kind["reasons"]) for kind in report["engine_kinds"]}
    assert "the drafter is in the GGUF format" in reasons["tensorrt_llm"]
    assert not reasons["onnxruntime"]


def test_scripts_for_other_engines_name_no_gguf_file(pair: Pair) -> None:
    config = BuildConfig.model_validate(
        {
            "name": "tiny",
            "target": {"path": pair.target_dir},
            "drafter": {"gguf": "d.gguf"},
            "engine": {"kind": "tensorrt_llm"},
        }
    )
    with pytest.raises(ConfigError, match="the drafter is a GGUF file"):
        export(config, "vllm", quiet)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0, Kind.Q5_1])
def test_every_precision_is_built(pair: Pair, tmp_path: Path, kind: Kind) -> None:
    drafter = as_directory(written(pair, tmp_path / "d.gguf", kind=kind))
    options: dict[str, Any] = {"slots": SLOTS, "max_seq_len": MAX_SEQ_LEN}
    models = build_engines(pair.target_dir, drafter, tmp_path / "e", **options)
    engines = (tmp_path / "e" / "target", tmp_path / "e" / "drafter")
    built = BuiltPair(pair, [[*range(3, 83)]] * 4, *models, *engines)
    assert all(len(tokens) == 40 for tokens, _ in committed(built))


def test_a_table_of_its_own_is_used(pair: Pair, tmp_path: Path) -> None:
    """As the converter writes an embedding of its own for masks: in a row of the target's."""
    chance = np.random.default_rng(0)
    embedding, head = (chance.standard_normal((320, 64)).astype(np.float32) for _ in range(2))
    tables = {"token_embd.weight": embedding}
    tied = load_drafter(as_directory(written(pair, tmp_path / "tied.gguf", tensors=tables)))
    assert np.array_equal(tied.weights.read("lm_head.weight"), embedding)
    tables["output.weight"] = head
    own = load_drafter(as_directory(written(pair, tmp_path / "own.gguf", tensors=tables)))
    assert np.array_equal(own.weights.read("lm_head.weight"), head)
    for drafter in (tied, own):
        assert drafter.spec.own_tables == ("embed_tokens", "lm_head")
        assert drafter.spec.draft_vocab_size is None
        check_pair(load_target(pair.target_dir), drafter, None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dflash.hyper_connection.count": 4}, "hyper_connection.count is 4"),
    ({"dflash.has_confidence_head": True}, "has_confidence_head is True"),
    ({"dflash.rope.dimension_count": 8}, "rope.dimension_count is 8, but heads have 16"),
    ({"dflash.rope.dimension_sections": [4, 2, 2, 0]}, "for more than a text's positions"),
    ({"dflash.rope.scaling.type": "longrope"}, "original_max_position_embeddings|longrope"),
    ({"dflash.attention.value_scale": 0.5}, "attention_value_scale is 0.5"),
    ({"dflash.attention.sliding_window": 9}, "without attention.sliding_window_pattern"),
    ({"dflash.hidden_activation": "gelu"}, "hidden_act is 'gelu'"),
    ({"dflash.target_layers": None}, "target_layer_ids is"),
    ({"dflash.attention.head_count": None}, "num_attention_heads is missing"),
    ({"dflash.block_size": 1}, "block_size"),
    ({"tokenizer.ggml.mask_token_id": None}, "no mask_token_id"),
    ({"tokenizer.ggml.mask_token_id": 320}, "mask_token_id is 320, but there are 320 tokens"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 values for 320 tokens"),
    ({"general.architecture": "eagle3"}, "architecture is 'eagle3'"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_is_not_handled_is_refused_by_name(
    pair: Pair, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    architecture = changed.get("general.architecture", "dflash")
    changed = {key: value for key, value in changed.items() if not key.startswith("general")}
    file = written(pair, tmp_path / "d.gguf", more=changed, architecture=architecture)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(as_directory(file))


def test_a_heads_rows_need_a_head(pair: Pair, tmp_path: Path) -> None:
    file = written(pair, tmp_path / "d.gguf", tensors={"d2t": np.arange(9)})
    with pytest.raises(CheckpointError, match="maps the rows of a head, but it has none"):
        as_directory(file)


def test_tensors_that_are_not_read_are_not_left_out(pair: Pair, tmp_path: Path) -> None:
    for name, message in (("markov_w1.weight", "DSpark"), ("blk.0.post.weight", "blk.0.post")):
        more = {name: np.zeros((320, 32), np.float32)}
        file = written(pair, tmp_path / "d.gguf", tensors=more)
        with pytest.raises(CheckpointError, match=message):
            check_pair(load_target(pair.target_dir), load_drafter(as_directory(file)), None)


def test_a_drafter_of_other_tokens(pair: Pair, tmp_path: Path) -> None:
    """Two files of different models, whose shapes agree."""
    tokens, _ = ggufs.vocabulary(320)
    file = written(pair, tmp_path / "d.gguf", more={"tokenizer.ggml.tokens": tokens})
    with pytest.raises(PairError, match="the target's 320 tokens another id"):
        check_pair(load_target(pair.target_dir), load_drafter(as_directory(file)), None)


def test_files_in_each_others_places(pair: Pair, tmp_path: Path) -> None:
    target = as_directory(ggufs.write(tmp_path / "t.gguf", pair.target_dir))
    drafter = as_directory(written(pair, tmp_path / "d.gguf"))
    with pytest.raises(CheckpointError, match="drafter's kind is not known"):
        load_drafter(target)
    with pytest.raises(CheckpointError, match="DFlashDraftModel"):
        load_target(drafter)
