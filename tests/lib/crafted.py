"""Tensors for the internal models that the front never sends: usual ones, spoilt at random."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from dflash_trt.decoding.messages import DraftInput, VerifyInput
from dflash_trt.engines.info import EngineInfo

EDGES = (0, 1, 2, 3, -1, -2, 7, 64, 255, 2**31, -(2**31), 2**63 - 1, -(2**63))
DRAWN = json.dumps({"sampling": {"temperature": 1.0}, "prompt_tokens": 1, "stop_ids": []}).encode()
RULES = (
    *(b"{", b"[]", b"null", b"\xff", b'"', b"[" * 50_000, b'{"sampling": {}}'),
    json.dumps({"sampling": {}, "prompt_tokens": 1, "stop_ids": [-1]}).encode(),
    json.dumps({"sampling": {}, "prompt_tokens": 1, "stop_ids": [2**40]}).encode(),
    json.dumps({"sampling": {"bad_words": [[]]}, "prompt_tokens": 1, "stop_ids": []}).encode(),
    json.dumps({"sampling": {"bad_words": [[-7]]}, "prompt_tokens": 1, "stop_ids": []}).encode(),
    json.dumps({"sampling": {"top_k": 0.5}, "prompt_tokens": 1, "stop_ids": []}).encode(),
    json.dumps(
        {"sampling": {"frequency_penalty": 1.0}, "prompt_tokens": -5, "stop_ids": [1]}
    ).encode(),
)


def usual_verify(rng: np.random.Generator, info: EngineInfo) -> VerifyInput:
    """Of some rows, which may be moved before."""
    n, drafts = int(rng.integers(1, info.slots + 1)), int(rng.integers(0, info.block_size))
    first = int(rng.integers(0, info.slots - n + 1))
    moves = rng.integers(0, info.slots, 3 * rng.integers(0, 3)).tolist()
    places = rng.integers(0, info.max_seq_len - drafts, n)
    tokens = rng.integers(0, info.vocab_size, (n, 1 + drafts))
    ids = rng.integers(0, info.vocab_size, (n, max(1, drafts), 4))
    ids[:, :drafts, 0] = tokens[:, 1:]  # what was drawn was a candidate
    return VerifyInput(
        batch=np.array([first, rng.integers(-1, 4), rng.integers(0, 3), *moves]),
        rows=np.array([[1 + drafts, 1, place, rng.integers(0, 9)] for place in places]),
        tokens=tokens,
        parents=np.zeros((n, 1), np.int64),
        rules=np.array([(b"", DRAWN)[rng.integers(2)] for _ in range(n)], object),
        uniforms=rng.random((n, 1 + 2 * info.block_size)),
        history=np.full((n, 1), -1),
        candidate_ids=ids,
        candidate_probs=rng.random((n, max(1, drafts), 4), np.float32),
    )


def usual_draft(rng: np.random.Generator, info: EngineInfo) -> DraftInput:
    """After a `usual_verify`, of the drafter's engine."""
    x = usual_verify(rng, info)
    n, width = x.tokens.shape
    results = np.column_stack([rng.integers(-1, width, n), x.tokens[:, 0], np.zeros(n, np.int64)])
    features = rng.standard_normal((n, width, info.feature_size), np.float32)
    return DraftInput(x.batch, x.rows, x.rules, x.uniforms, results, features)


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
        return RULES[rng.integers(len(RULES))]
    if dtype == np.int64:
        return EDGES[rng.integers(len(EDGES))]
    return [0.0, 1.0, -1.0, 1e30, np.nan, np.inf, -np.inf][rng.integers(7)]
