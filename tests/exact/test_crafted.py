"""Crafted calls of the internal models: a sentence, and no row of the KV caches is touched."""

from __future__ import annotations

import numpy as np
import pytest
from built_pairs import BuildPair
from crafted import BLOCKS, STORED, send, usual_draft, usual_verify

from dflash_trt.decoding import check_draft_input, check_verify_input, draft, verify
from dflash_trt.engines.onnxruntime import Engine


def test_crafted_tensors(built_pair: BuildPair) -> None:
    """A few; `make prove` sends more."""
    pair = built_pair(taught=False)
    counts = send(pair.target_engine, pair.drafter_engine, seed=0, count=300)
    assert counts["verify refused"] > counts["verify run"] > 0
    assert min(counts["draft refused"], counts["draft run"]) > 0


@pytest.mark.parametrize("seed", range(20))
def test_usual_tensors_pass(built_pair: BuildPair, seed: int) -> None:
    pair, rng = built_pair(taught=False), np.random.default_rng(seed)
    target, drafter = Engine(pair.target_engine), Engine(pair.drafter_engine)
    x, y = usual_verify(rng, target.info), usual_draft(rng, drafter.info)
    for engine in (target, drafter):
        for block in BLOCKS:
            engine.move_row(0, block, STORED)
    check_verify_input(target.info, x, target.kept)
    verify(target, x)
    check_draft_input(drafter.info, y, drafter.kept)
    draft(drafter, y)
