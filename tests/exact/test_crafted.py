"""Crafted calls of the internal models: a sentence, and no row of the KV caches is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from built_pairs import BuildPair
from crafted import BLOCKS, STORED, spoil, usual_draft, usual_verify

from dflash_trt.decoding import check_draft_input, check_verify_input, draft, verify
from dflash_trt.decoding.messages import slot_copies
from dflash_trt.decoding.speculation import FeatureBuffer
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.errors import RequestError

COUNT = int(os.environ.get("CRAFTED_COUNT", "300"))
SEED = int(os.environ.get("CRAFTED_SEED", "0"))


def _run(
    engine: Engine, make: Callable[..., Any], check: Callable[..., None], step: Callable[..., Any]
) -> tuple[int, int]:
    """How many crafted inputs were refused and run; AssertionError where one does harm."""
    rng = np.random.default_rng(SEED)
    slots = engine.info.slots
    for caches in engine._alike:
        caches[:] = rng.standard_normal(caches.shape, np.float32)
    refused = 0
    for number in range(COUNT):
        x = spoil(rng, make(rng, engine.info))
        before, kept = [caches.copy() for caches in engine._alike], dict(engine.kept)
        mine: set[int] = set()
        try:
            check(engine.info, x, engine.kept)
            first, _, _, *copies = x.batch.tolist()
            mine = {*range(first, first + len(x.rows))} | {to for _, to, *_ in slot_copies(copies)}
            step(engine, x)
        except RequestError:
            assert (mine, engine.kept) == (set(), kept), number
            refused += 1
        except RuntimeError as error:  # an engine does not say how many tokens its drafter embeds
            if "Gather" not in str(error):
                raise
        others = [row for row in range(slots) if row not in mine]
        for was, caches in zip(before, engine._alike, strict=True):
            assert np.array_equal(was[:, others], caches[:, others], equal_nan=True), number
            caches[:] = was
    return refused, COUNT - refused


def test_crafted_tensors_for_verify(built_pair: BuildPair) -> None:
    engine = Engine(built_pair(taught=False).target_engine)
    held = FeatureBuffer()
    step = lambda engine, x: verify(engine, x, held)  # noqa: E731
    refused, run = _run(engine, usual_verify, check_verify_input, step)
    assert refused > run > 0


def test_crafted_tensors_for_draft(built_pair: BuildPair) -> None:
    engine = Engine(built_pair(taught=False).drafter_engine)
    refused, run = _run(engine, usual_draft, check_draft_input, draft)
    assert refused > 0 < run


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
