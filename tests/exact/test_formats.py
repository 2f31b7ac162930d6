"""Drafters in the formats of `speculators`, NVIDIA ModelOpt and DeepSpec, and of other methods.

`samples/` holds drafters that these wrote themselves, with the logits they computed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_trt.checkpoints import draft_token_ids, load_drafter, load_target
from dflash_trt.checks import check_pair
from dflash_trt.decoding import Request
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import CheckpointError, PairError
from dflash_trt.speculation import Fixed
from tests.support import reference
from tests.support.builds import build_engines
from tests.support.built_pairs import MAX_SEQ_LEN, SLOTS, BuiltPair
from tests.support.equality import (
    NEW_TOKENS,
    drafter_step,
    one_by_one,
    rounds_of,
    run_all,
    scheduler_of,
)
from tests.support.families import DRAFTER, TARGET, to_speculators
from tests.support.op_profile import assert_in_profile
from tests.support.pairs import Pair, teach, tiny_tokenizer, write_pair

pytestmark = pytest.mark.models

SAMPLES = Path(__file__).parents[1] / "samples"


def target_of(expected: Any, directory: Path) -> Path:
    """Return a target with the embedding and head that a sample was computed with."""
    config = LlamaConfig(**TARGET | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 5})
    model = AutoModelForCausalLM.from_config(config)
    model.model.embed_tokens.weight.data = torch.tensor(expected["embedding"])
    if len(expected["head"]) == 64:
        model.lm_head.weight.data = torch.tensor(expected["head"])
    model.save_pretrained(directory)
    tiny_tokenizer(config.vocab_size).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "speculators-reduced",
        "speculators-full",
        "speculators-dflash2",
        "modelopt-bidirectional",
        "modelopt-causal",
        "modelopt-sinks",
        "deepspec-dflash",
    ],
)
def test_logits_are_those_of_the_library_that_wrote_the_drafter(name: str, tmp_path: Path) -> None:
    expected = np.load(SAMPLES / name / "expected.npz")
    target = target_of(expected, tmp_path / "target")
    _, drafter = build_engines(
        target, SAMPLES / name, tmp_path / "engines", slots=1, max_seq_len=MAX_SEQ_LEN
    )
    if drafter.spec.selector is None:  # else in test_dflash2.py
        assert_in_profile(tmp_path / "engines" / "drafter" / "model.onnx")
    engine, seen = Engine(tmp_path / "engines" / "drafter"), 0
    reduced = name == "speculators-reduced"
    from_anchor = name in ("speculators-reduced", "deepspec-dflash")
    assert drafter.spec.sample_from_anchor is from_anchor
    for i, (start, logits) in enumerate(zip(expected["starts"], expected["logits"], strict=True)):
        output = drafter_step(
            engine, expected["features"][seen:start], expected["text"][start], seen
        )
        drafts = logits if from_anchor else logits[1:]
        np.testing.assert_allclose(output["logits"], drafts, atol=1e-4, rtol=0)
        best = np.argsort(-output["logits"], axis=-1, kind="stable")[:, : engine.info.best]
        ids = draft_token_ids(drafter.weights, drafter.spec) if reduced else np.arange(64)
        assert (output["top_ids"] == ids[best]).all()
        assert engine.info.pair_scores is ("pair_scores" in expected)
        if engine.info.pair_scores:
            scores = expected["pair_scores"][i]
            np.testing.assert_allclose(output["pair_scores"], scores, atol=1e-4, rtol=0)
        seen = start


def test_a_selector_over_a_reduced_head(tmp_path: Path) -> None:
    """Without the tokens that are never among the best, scores stay those of the library."""
    sample = SAMPLES / "speculators-dflash2"
    expected = np.load(sample / "expected.npz")
    top_k = expected["pair_scores"].shape[-1]
    best = np.argsort(-expected["logits"][:, 1:], axis=-1)[..., :top_k]
    ids = torch.tensor(np.unique(best))
    assert top_k < len(ids) < 64
    drafter = Path(shutil.copytree(sample, tmp_path / "drafter"))
    tensors = load_file(drafter / "model.safetensors")
    tensors["lm_head.weight"] = torch.tensor(expected["head"])[ids].bfloat16()
    tensors["d2t"] = ids - torch.arange(len(ids))
    save_file(tensors, drafter / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(ids)}))
    target = target_of(expected, tmp_path / "target")
    build_engines(target, drafter, tmp_path / "engines", slots=1, max_seq_len=MAX_SEQ_LEN)
    engine, seen = Engine(tmp_path / "engines" / "drafter"), 0
    for i, start in enumerate(expected["starts"]):
        output = drafter_step(
            engine, expected["features"][seen:start], expected["text"][start], seen
        )
        logits = expected["logits"][i, 1:][:, ids]
        np.testing.assert_allclose(output["logits"], logits, atol=1e-4, rtol=0)
        assert (output["top_ids"] == best[i]).all()
        scores = expected["pair_scores"][i]
        np.testing.assert_allclose(output["pair_scores"], scores, atol=1e-4, rtol=0)
        seen = start
    (drafter / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 3}))
    with pytest.raises(CheckpointError, match="selector_top_k is 4, but drafts are of 3 tokens"):
        load_drafter(drafter)


def to_deepspec(pair: Pair, directory: Path) -> None:
    """Rewrite a z-lab drafter as DeepSpec saves it, with the target's tables as its own."""
    config = json.loads((pair.drafter_dir / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 0,
        **config.pop("dflash_config"),
    }
    target = load_file(pair.target_dir / "model.safetensors")
    tables = {
        "embed_tokens.weight": target["model.embed_tokens.weight"],
        "lm_head.weight": target["lm_head.weight"],
    }
    directory.mkdir()
    save_file(
        load_file(pair.drafter_dir / "model.safetensors") | tables, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["full", "reduced", "from-anchor", "deepspec"])
def rewritten(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BuiltPair, list[int]]:
    """Return a taught pair with a drafter in another format, and the tokens it can draft."""
    directory, form = tmp_path_factory.mktemp("pair"), request.param
    from_anchor = form in ("from-anchor", "deepspec")
    pair = write_pair(directory, LlamaConfig(**TARGET), DRAFTER)
    texts = teach(pair, first=0 if from_anchor else 1)
    ids = list(range(320))
    if form in ("reduced", "from-anchor"):  # one of the texts' tokens in six cannot be drafted
        used = sorted({token for text in texts for token in text})
        ids = sorted({*ids[::3], *used} - {*used[::6]})
    if form == "deepspec":
        to_deepspec(pair, directory / "rewritten")
    else:
        to_speculators(pair, directory / "rewritten", from_anchor=from_anchor, ids=ids)
    engines = directory / "engines"
    target, drafter = build_engines(
        pair.target_dir, directory / "rewritten", engines, slots=SLOTS, max_seq_len=MAX_SEQ_LEN
    )
    built = BuiltPair(pair, texts, target, drafter, engines / "target", engines / "drafter")
    return built, ids


def test_same_text_and_as_many_drafts_kept_as_the_reference(
    rewritten: tuple[BuiltPair, list[int]],
) -> None:
    built, ids = rewritten
    pair, spec = built.pair, built.drafter.spec
    drafts = 8 if spec.sample_from_anchor else 7
    assert spec.block_size == drafts + 1
    prompts = [text[: 12 + 3 * i] for i, text in enumerate(built.texts[:4])]
    greedy = reference.greedy(pair.target_dir, prompts, NEW_TOKENS)
    scheduler = scheduler_of(rounds_of(built), Fixed(spec.block_size - 1))
    alone = one_by_one(scheduler, prompts)
    together = run_all(scheduler, [Request(prompt, NEW_TOKENS) for prompt in prompts])
    first, taken = 1 - spec.sample_from_anchor, []
    for sequence, other, prompt, text in zip(alone, together, prompts, greedy, strict=True):
        assert sequence.tokens == other.tokens == text
        expected = reference.round_lengths(
            pair.target_dir, pair.drafter_dir, prompt, text, drafts, first, ids
        )
        assert sequence.committed_per_round == other.committed_per_round == expected
        taken += expected
    assert np.mean(taken) > 1.15
    assert max(taken) == drafts + 1 or len(ids) < 320


Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def reduced(tmp_path: Path) -> tuple[Path, Path]:
    """Return a target for the sample with a reduced head, and a copy of it to change."""
    sample = SAMPLES / "speculators-reduced"
    target = target_of(np.load(sample / "expected.npz"), tmp_path / "target")
    return target, Path(shutil.copytree(sample, tmp_path / "drafter"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(speculators_model_type="dspark"), "is DSpark"),
        (lambda c: c.update(speculators_model_type="eagle3"), "is EAGLE"),
        (lambda c: c.update(speculators_model_type="mtp"), "is MTP"),
        (lambda c: c.update(speculators_model_type="other"), "speculators_model_type other"),
        (lambda c: c.pop("transformer_layer_config"), "no transformer_layer_config"),
        (lambda c: c.pop("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids is None"),
        (lambda c: c.pop("mask_token_id"), "no mask_token_id"),
        (lambda c: c.update(target_hidden_size=64), "hidden_size and the target's differ"),
        (lambda c: c.update(sample_from_anchor="no"), "sample_from_anchor is 'no'"),
        (
            lambda c: c["transformer_layer_config"].update(use_sliding_window=False),
            "use_sliding_window is not true",
        ),
        (lambda c: c.update(draft_vocab_size=25), r"lm_head.weight .* is \[24, 32\]"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 3]), "taps layer -1"),
    ],
)
def test_a_speculators_config_that_cannot_run_is_refused(
    change: Change, says: str, reduced: tuple[Path, Path]
) -> None:
    target, drafter = reduced
    config = json.loads((drafter / "config.json").read_text())
    change(config)
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, PairError), match=says):
        check_pair(load_target(target), load_drafter(drafter), None)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"d2t": torch.arange(24) * 3}, "d2t .* does not map its 24 tokens"),
        ({"d2t": -torch.arange(24)}, "d2t .* does not map"),
        ({"d2t": torch.zeros(24)}, "d2t .* does not map"),
        ({"layers.0.self_attn.g_proj.weight": torch.zeros(4)}, "g_proj"),
        ({"mask_embedding": torch.zeros(4)}, "mask_embedding"),
    ],
)
def test_tensors_that_cannot_be_used_are_refused(
    tensor: dict[str, torch.Tensor], says: str, reduced: tuple[Path, Path]
) -> None:
    target, drafter = reduced
    file = drafter / "model.safetensors"
    save_file(load_file(file) | tensor, file)
    loaded = load_drafter(drafter)
    with pytest.raises(CheckpointError, match=says):  # noqa: PT012
        check_pair(load_target(target), loaded, None)
        draft_token_ids(loaded.weights, loaded.spec)
