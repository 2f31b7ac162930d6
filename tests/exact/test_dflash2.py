"""DFlash 2 drafters, dynamic convolutions and candidate selector, against z-lab's `dflash`."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash.model import DFlash2DraftModel
from transformers import LlamaConfig

from dflash_trt.checkpoints import load_drafter
from dflash_trt.decoding import Request
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import CheckpointError
from dflash_trt.speculation import Fixed
from tests.support import reference
from tests.support.built_pairs import built_from
from tests.support.equality import (
    NEW_TOKENS,
    TOLERANCE,
    Case,
    assert_drafter_logits,
    case_for,
    drafter_step,
    rounds_of,
    run_all,
    scheduler_of,
)
from tests.support.families import DFLASH2, DFLASH2_TARGET
from tests.support.pairs import write_pair

pytestmark = pytest.mark.models


@pytest.fixture
def case(case_of: Callable[[str], Case]) -> Case:
    return case_of("dflash2")


def blocks(case: Case) -> Iterator[tuple[int, torch.Tensor, Any, Any]]:
    """Yield blocks as decoding does: the anchor, z-lab's states, our ids and pair scores."""
    text, pair, spec = case.built.texts[0], case.built.pair, case.built.drafter.spec
    starts = [13, 14, 17, 25, 33, 60]
    states = reference.drafter_states(pair.target_dir, pair.drafter_dir, text, starts)
    _, features = reference.target_logits_and_taps(pair.target_dir, text, spec.target_layer_ids)
    engine, seen = Engine(case.built.drafter_engine), 0
    for start, state in zip(starts, states, strict=True):
        output = drafter_step(engine, features[seen:start], text[start], seen, row=1)
        yield text[start], state, output["top_ids"], output["pair_scores"]
        seen = start


def test_pair_scores(case: Case) -> None:
    pair = case.built.pair
    for anchor, states, ids, scores in blocks(case):
        places, k = ids.shape
        expected = reference.selector_probs(
            pair.target_dir,
            pair.drafter_dir,
            states.repeat_interleave(k, 0),
            np.concatenate([np.full((1, k), anchor), ids[:-1]]).ravel().tolist(),
        )
        expected = expected.reshape(places, k, -1)
        expected = np.take_along_axis(expected, np.repeat(ids[:, None], k, 1), -1)
        found = scores - np.logaddexp.reduce(scores, -1, keepdims=True)
        np.testing.assert_allclose(found, np.log(expected), atol=TOLERANCE, rtol=0)


def test_other_kernels_groups_and_candidates(tmp_path: Path) -> None:
    own = DFLASH2["dflash_config"] | {
        "block_size": 5,
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": 12,
        "selector_top_k": 6,
    }
    pair = write_pair(
        tmp_path,
        LlamaConfig(**DFLASH2_TARGET),
        DFLASH2 | {"layer_types": ["full_attention"] * 3, "dflash_config": own},
        drafter_class=DFlash2DraftModel,
        dtype="bfloat16",
    )
    case = case_for(built_from(pair, tmp_path, taught=False))
    assert_drafter_logits(case)
    test_pair_scores(case)
    (zlab, *_) = case.zlab
    scheduler = scheduler_of(rounds_of(case.built), Fixed(4))
    (sequence,) = run_all(scheduler, [Request(case.prompts[0], NEW_TOKENS)])
    assert sequence.tokens == zlab.tokens == case.greedy[0]
    assert sequence.committed_per_round == zlab.acceptance_lengths


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"conv_kernel_size": 0}, "conv_kernel_size"),
        ({"conv_kernel_size": None}, "conv_kernel_size"),
        ({"selector_rank": "16"}, "selector_rank"),
    ],
)
def test_a_wrong_config_is_named(
    case: Case, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    drafter = shutil.copytree(case.built.pair.drafter_dir, tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"] |= changes
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=named):
        load_drafter(drafter)
