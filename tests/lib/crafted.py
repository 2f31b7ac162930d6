"""Tensors for the internal models that the front never sends: usual ones, spoilt at random."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.decoding import (
    DraftInput,
    VerifyInput,
    check_draft_input,
    check_verify_input,
    draft,
    verify,
)
from dflash_trt.decoding.messages import FREED, slot_copies
from dflash_trt.decoding.speculation import FeatureBuffer
from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.engines.step import KEPT
from dflash_trt.errors import RequestError

EDGES = (0, 1, 2, 3, -1, -2, 7, 64, 255, 2**31, -(2**31), 2**63 - 1, -(2**63))

BLOCKS, STORED = (KEPT, KEPT + 1), 4  # tokens of each


def _processor(prompt_tokens: int = 1, stop_ids: Sequence[int] = (), **sampling: object) -> bytes:
    values = {"sampling": sampling, "prompt_tokens": prompt_tokens, "stop_ids": stop_ids}
    return json.dumps(values).encode()


SAMPLED = _processor(temperature=1.0)
SAMPLING = (
    *(b"{", b"[]", b"null", b"\xff", b'"', b"[" * 50_000, b'{"sampling": {}}'),
    _processor(stop_ids=[-1]),
    _processor(stop_ids=[2**40]),
    _processor(bad_words=[[]]),
    _processor(bad_words=[[-7]]),
    _processor(logit_bias=[[2**40, 1.0]]),
    _processor(logit_bias=[[1]]),
    _processor(top_k=0.5),
    _processor(-5, [1], frequency_penalty=1.0),
)


def usual_verify(rng: np.random.Generator, info: EngineInfo) -> VerifyInput:
    """Of some rows, which may be moved before."""
    n, drafts = int(rng.integers(1, info.slots + 1)), int(rng.integers(0, info.block_size))
    first = int(rng.integers(0, info.slots - n + 1))
    copies = [number for _ in range(rng.integers(0, 3)) for number in _copy(rng, info)]
    places = rng.integers(0, info.max_seq_len - drafts, n)
    tokens = rng.integers(0, info.vocab_size, (n, 1 + drafts))
    return VerifyInput(
        batch=np.array([first, rng.integers(-1, 4), rng.integers(1, 4), *copies]),
        rows=np.array([[1 + drafts, 1, place, rng.integers(0, 9)] for place in places]),
        tokens=tokens,
        parents=np.zeros((n, 1), np.int64),
        sampling=np.array([(b"", SAMPLED)[rng.integers(2)] for _ in range(n)], object),
        history=np.full((n, 1), -1),
        masks=_masks(rng, n, drafts, info.vocab_size),
    )


def _copy(rng: np.random.Generator, info: EngineInfo) -> list[int]:
    """From a slot to another or to a block, from a block that may be there, or one that goes."""
    slot, other = rng.integers(0, info.slots, 2).tolist()
    block, start = int(rng.choice(BLOCKS)), int(rng.integers(0, info.cache_len - STORED))
    pairs = ((slot, other), (slot, block), (block, slot), (KEPT + 2, FREED))
    return [*pairs[rng.integers(4)], STORED, start]


def _masks(rng: np.random.Generator, n: int, drafts: int, vocab: int) -> np.ndarray[Any, Any]:
    if rng.integers(2):
        return np.full((n, 1, 1), -1, np.int32)
    return rng.integers(-(2**31), 2**31, (n, 1 + drafts, -(-vocab // 32)), np.int32)


def usual_draft(rng: np.random.Generator, info: EngineInfo) -> DraftInput:
    """After a `usual_verify`, of the drafter's engine."""
    x = usual_verify(rng, info)
    n, width = x.tokens.shape
    results = np.column_stack([rng.integers(-1, width, n), x.tokens[:, 0], np.zeros(n, np.int64)])
    features = rng.standard_normal((n, width, info.feature_size), np.float32)
    return DraftInput(x.batch, x.rows, results, features)


def spoil(rng: np.random.Generator, x: Any) -> Any:
    """The same with one to three of its arrays changed in a value or in shape."""
    for name in rng.choice(x._fields, rng.integers(1, 4), replace=False).tolist():
        array = getattr(x, name).copy()
        how = rng.integers(4)
        if how == 0 and array.size:  # a value
            at = tuple(rng.integers(0, size) for size in array.shape)
            array[at] = _value(rng, array.dtype)
        elif how == 1:  # a size
            axis = rng.integers(array.ndim)
            size = int(rng.choice([0, 1, 2, 5, 33]))
            array = np.resize(array, [*array.shape[:axis], size, *array.shape[axis + 1 :]])
        elif how == 2:  # all values
            array[...] = _value(rng, array.dtype)
        elif array.dtype == np.int64:  # nothing but noise
            array = rng.choice(np.array(EDGES, np.int64), array.shape)
        x = x._replace(**{name: array})
    return x


def _value(rng: np.random.Generator, dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject:
        return SAMPLING[rng.integers(len(SAMPLING))]
    if np.issubdtype(dtype, np.integer):
        return np.int64(EDGES[rng.integers(len(EDGES))]).astype(dtype)
    return [0.0, 1.0, -1.0, 1e30, np.nan, np.inf, -np.inf][rng.integers(7)]


def send(target: Path, drafter: Path, seed: int, count: int) -> Counter[str]:
    """So many to either engine, how many were refused and run; AssertionError if one does harm."""
    held = FeatureBuffer()
    step = lambda engine, x: verify(engine, x, held)  # noqa: E731
    rng, counts = np.random.default_rng(seed), Counter[str]()
    for name, path, kind in (
        ("verify", target, (usual_verify, check_verify_input, step)),
        ("draft", drafter, (usual_draft, check_draft_input, draft)),
    ):
        refused = _send(Engine(path), *kind, rng, count)
        counts += Counter({f"{name} refused": refused, f"{name} run": count - refused})
    return counts


def _send(
    engine: Engine,
    make: Callable[..., Any],
    check: Callable[..., None],
    step: Callable[..., Any],
    rng: np.random.Generator,
    count: int,
) -> int:
    slots = engine.info.slots
    for caches in engine._alike:
        caches[:] = rng.standard_normal(caches.shape, np.float32)
    refused = 0
    for number in range(count):
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
    return refused
