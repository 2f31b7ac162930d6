"""LiLiCorr's head in our graphs, against the numbers of TensorRT-LLM's own test.

`tests/unittest/_torch/speculative` there compares its head with ModelOpt's: 11 numbers that come of
parameters which are sines of their names and places.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builds import config_of, quiet
from op_profile import PROFILE
from pairs import make_pair
from safetensors.numpy import load_file, save_file

from dflash_trt.build.run import build
from dflash_trt.checkpoints import Corrector, DecoderSpec, Weights, load_drafter
from dflash_trt.checkpoints.lilicorr import corrector_shapes, is_lilicorr
from dflash_trt.config import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.decoding.messages import DraftInput
from dflash_trt.decoding.rounds import draft
from dflash_trt.engines import load_engine
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.errors import PairError
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.layers import Best
from dflash_trt.graphs.lilicorr import lattice_scores

HEAD = Corrector(
    top_k=3,
    hidden_size=8,
    layers=2,
    heads=2,
    intermediate_size=16,
    factor_dim=8,
    vector_eps=1e-4,
    logit_scale=8.0,
)
FIELDS = {
    "lilicorr_hidden_size": 8,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2,
    "lilicorr_candidate_topk": 3,
    "lilicorr_factor_dim": 8,
    "lilicorr_vector_eps": 1e-4,
    "lilicorr_logit_scale": 8,
}
# no plan was built of these, and no kernel of a GPU looked up
LATTICE = {"Exp", "LayerNormalization", "ReduceL2", "ReduceLogSumExp"}
# as TensorRT-LLM names what ModelOpt exports as a sequence
NAMES = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
START = [-2.00565147, -2.00631571, -2.01010752]
PAIRS = [
    [
        [1.16437435, 1.16812551, 1.15701485],
        [1.16656375, 1.17030466, 1.15921211],
        [1.17068172, 1.17445230, 1.16334319],
    ],
    [
        [1.14806044, 1.14459574, 1.12698877],
        [1.14481199, 1.14134955, 1.12373281],
        [1.14475155, 1.14125943, 1.12357390],
    ],
]


def parameters(hidden_size: int, block_size: int) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for name, shape in corrector_shapes(HEAD, hidden_size, block_size).items():
        theirs = name.removeprefix("lilicorr.")
        for ours, known in NAMES.items():
            theirs = theirs.replace(ours, known)
        places = np.arange(np.prod(shape), dtype=np.float32)
        values = np.sin(places * np.float32(0.17) + sum(theirs.encode()) * 0.013) * 0.2
        found[name] = values.reshape(shape).astype(np.float32)
    return found


def test_scores_are_the_published_ones(tmp_path: Path) -> None:
    """One block of three masks, three candidates each, over 16 tokens of 32 numbers."""
    table = np.linspace(-1.2, 1.3, 512, dtype=np.float32).reshape(16, 32)
    save_file(parameters(32, 4) | {"table": table}, tmp_path / "model.safetensors")
    spec = DecoderSpec(
        vocab_size=16,
        hidden_size=32,
        num_attention_heads=2,
        layers=(),
        rms_norm_eps=1e-5,
        max_position_embeddings=8,
    )
    g = GraphBuilder("head", spec, Weights(tmp_path))
    floats = {"hidden": ("r", 32), "logits": ("r", 3), "all_logits": ("r", 16), "anchor": ("n", 32)}
    given = {name: g.input(name, ir.DataType.FLOAT, shape) for name, shape in floats.items()}
    integers = {"block": ("n", "W"), "ids": ("r", 3)}
    given |= {name: g.input(name, ir.DataType.INT64, shape) for name, shape in integers.items()}
    block, anchor = given.pop("block"), given.pop("anchor")
    lattice_scores(g, HEAD, 4, block, anchor, g.matrix("table"), Best(**given))
    g.save(tmp_path, lambda _: None)
    # log-probabilities as they are: what is not a candidate makes them sum to one
    likely = np.array([[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]], np.float32)
    ids = np.array([[2, 5, 9], [6, 3, 1], [4, 7, 8]])
    rest = np.log((1 - np.exp(likely).sum(-1)) / 13)
    everything = np.repeat(rest[:, None], 16, axis=1).astype(np.float32)
    np.put_along_axis(everything, ids, likely, axis=-1)
    options = ort.SessionOptions()
    use_one_pool(1)  # otherwise an engine of another test could have set it, or not
    options.use_per_session_threads = False
    session = ort.InferenceSession(tmp_path / "model.onnx", options)
    (scores,) = session.run(
        ["pair_scores"],
        {
            "hidden": np.linspace(-0.7, 0.9, 96, dtype=np.float32).reshape(3, 32),
            "anchor": np.linspace(-0.5, 0.4, 32, dtype=np.float32).reshape(1, 32),
            "logits": likely + 5,  # normalised over all tokens, however they are shifted
            "all_logits": everything + 5,
            "ids": ids,
            "block": np.zeros((1, 4), np.int64),
        },
    )
    np.testing.assert_allclose(scores[0], [START] * 3, atol=2e-5)
    np.testing.assert_allclose(scores[1:], PAIRS, atol=2e-5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DFlash pair whose drafter has the head, too."""
    directory = tmp_path_factory.mktemp("lilicorr")
    make_pair(directory, block_size=8)
    drafter = directory / "drafter"
    values = json.loads((drafter / "config.json").read_text())
    own = values.setdefault("dflash_config", {})
    own.update(FIELDS)
    values["architectures"] = ["LiLiCorrDraftModel"]
    (drafter / "config.json").write_text(json.dumps(values))
    weights = load_file(drafter / "model.safetensors")
    weights |= parameters(values["hidden_size"], own.get("block_size") or values["block_size"])
    save_file(weights, drafter / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def built(pair: Path) -> Path:
    config = config_of(pair, speculation={"method": "lilicorr"})
    return build(config, pair / "built", quiet).directory


def test_it_is_known_by_its_marks(pair: Path) -> None:
    for marks in (
        {"architectures": ["LiLiCorrDraftModel"]},
        {"dflash_config": {"projector_type": "lilicorr"}},
        {"dflash_config": {"lilicorr_enabled": True}},
    ):
        assert is_lilicorr(marks)
    assert not is_lilicorr({"architectures": ["DFlashDraftModel"], "dflash_config": {}})
    assert load_drafter(pair / "drafter").spec.corrector == HEAD


def test_text_is_the_targets(built: Path) -> None:
    for speculation in (
        Speculation(method="lilicorr"),
        Speculation(method="lilicorr", policy="fixed"),
    ):
        prompts = [[5, 6, 7, 8] * 6, [9, 10, 11, 9, 10, 11, 9]]
        found = check_lossless(built / "engines", prompts, 40, speculation, lambda _: None)
        assert found.identical == found.total == len(prompts)
    model = onnx.load(built / "engines" / "drafter" / "model.onnx", load_external_data=False)
    assert {node.op_type for node in model.graph.node} - PROFILE == LATTICE


def test_each_block_goes_on_from_its_own_last_token(built: Path) -> None:
    """A sequence with fewer features than its neighbour drafts as it does alone."""
    engine = load_engine(built / "engines" / "drafter")
    rng = np.random.default_rng(1)
    features = rng.standard_normal((2, 5, engine.info.feature_size)).astype(np.float32)
    features[1, 2:] = 100  # of drafts that were rejected
    # of five tokens all were kept, or two
    rows, results = [[5, 1, 0, 40]] * 2, [[4, 7, 0], [1, 9, 0]]

    def drafts(which: list[int]) -> tuple[Any, Any]:
        x = DraftInput(
            np.array([0, 7, 3]),
            np.array([rows[i] for i in which]),
            np.array([results[i] for i in which]),
            features[which],
        )
        found = draft(engine, x)
        return found.candidate_ids, found.candidate_probs

    together = drafts([0, 1])
    for i in range(2):
        ids, probs = drafts([i])
        np.testing.assert_array_equal(together[0][i], ids[0])
        np.testing.assert_allclose(together[1][i], probs[0], atol=1e-5)
    features[1, 2:] = -3  # nothing that was rejected matters
    np.testing.assert_allclose(drafts([1])[1], probs, atol=1e-5)
    features[1, 1] = rng.standard_normal(engine.info.feature_size)  # its last one does
    assert np.abs(drafts([1])[1] - probs).max() > 1e-4


def test_the_method_is_the_drafters(pair: Path) -> None:
    """Both ways: a head is not dropped, and none is made up."""
    with pytest.raises(PairError, match=r"is LiLiCorr, speculation\.method dflash"):
        build(config_of(pair), pair / "other", quiet)
