"""Whether a round's tensors stay within an engine's slots, lengths and tokens.

Only the front sends any, and it sends none that do not: what fails here is a crafted call or a bug,
and is refused before a slot is touched.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_trt.decoding.logits_processor import LogitsProcessor, decode
from dflash_trt.decoding.messages import (
    DISCARD,
    FREED,
    DraftInput,
    Int64,
    VerifyInput,
    slot_copies,
)
from dflash_trt.engines import KEPT, EngineInfo
from dflash_trt.errors import RequestError

NONE: Mapping[int, int] = {}


def check_verify_input(info: EngineInfo, x: VerifyInput, kept: Mapping[int, int] = NONE) -> None:
    """RequestError unless `rounds.verify` can run it on a target's engine; kept: `Engine.kept`."""
    n = _check_rows(info, x.batch, x.rows, kept)
    width = x.tokens.shape[-1]
    _require("tokens", x.tokens.shape == (n, width) and 1 <= width <= info.widest)
    _require("tokens", _within(x.tokens, 0, info.vocab_size))
    rows = x.rows.tolist()
    for length, known, place, _ in rows:
        _require("rows", 1 <= known <= length <= width)
        _require("rows", length - known < info.most_verified)
        _require("rows", place + width <= info.cache_len)
    _require("parents", x.parents.shape in ((n, 1), (n, width)))
    if x.parents.shape[-1] > 1:
        _require("parents", all(known == 1 for _, known, _, _ in rows))
        before = np.maximum(np.arange(width), 1)  # a parent comes before its children
        _require("parents", _within(x.parents, 0, before))
    for processor, (length, known, place, _) in zip(_processors(x.sampling, n), rows, strict=True):
        if processor.scores_prompt(place):
            _require("rows", n == 1 and known == length < info.most_verified)
        words = processor.sampling.bad_words
        ids = [*processor.stop_ids, *(token for word in words for token in word)]
        ids += [token for token, _ in processor.sampling.logit_bias]
        _require("sampling", all(words) and all(0 <= token < info.vocab_size for token in ids))
    _require("history", x.history.shape[:-1] == (n,) and x.history.shape[-1] <= info.cache_len)
    _require("history", _within(x.history, -1, info.vocab_size))
    drafts = max(length - known for length, known, _, _ in rows)
    no_masks = x.masks.shape == (n, 1, 1) and bool((x.masks == -1).all())
    _require("masks", no_masks or x.masks.shape == (n, 1 + drafts, -(-info.vocab_size // 32)))


def check_draft_input(info: EngineInfo, x: DraftInput, kept: Mapping[int, int] = NONE) -> None:
    """RequestError unless `rounds.draft` can run it on a drafter's engine; kept: `Engine.kept`."""
    n = _check_rows(info, x.batch, x.rows, kept)
    context = x.features.shape[1] if x.features.ndim == 3 else 0
    _require("features", x.features.shape == (n, context, info.feature_size) and context >= 1)
    _require("results", x.results.ndim == 2 and len(x.results) == n and x.results.shape[1] >= 3)
    drafts = int(x.batch[1]) > 0
    room = info.cache_len - context - info.block_size
    lines = zip(x.rows.tolist(), x.results.tolist(), strict=True)
    for (length, known, place, _), (accepted, token, older, *_) in lines:
        _require("rows", 1 <= known <= length)
        _require("results", -1 <= accepted <= length - known and token >= 0)
        _require("results", 0 <= older <= place)
        if drafts:
            _require("features", place - older <= room and older + known + accepted <= context)


def _check_rows(info: EngineInfo, batch: Int64, rows: Int64, kept: Mapping[int, int]) -> int:
    """What both steps have; returns the number of rows."""
    _require("batch", batch.ndim == 1 and len(batch) >= 3 and len(batch) % 4 == 3)
    first_slot, num_draft_tokens, candidates, *copies = batch.tolist()
    n = len(rows)
    _require("rows", rows.shape == (n, 4) and n >= 1 and bool((rows[:, 2:] >= 0).all()))
    _require("batch", first_slot >= 0 and first_slot + n <= info.slots)
    _require("batch", num_draft_tokens >= DISCARD)
    _require("batch", candidates >= (num_draft_tokens > 0))
    blocks = dict[int, int]()  # what these copies change
    for source, destination, tokens, start in slot_copies(copies):
        _require("batch", tokens >= 0 and 0 <= start <= info.cache_len - tokens)
        if source < KEPT:
            _require("batch", 0 <= source < info.slots)
            _require("batch", FREED <= destination < info.slots or destination >= KEPT)
        elif destination == FREED:
            blocks[source] = 0
        else:
            _require("batch", 0 <= destination < info.slots)
            _require("batch", tokens == blocks.get(source, kept.get(source, 0)) > 0)
        if destination >= KEPT:
            blocks[destination] = tokens
    return n


def _processors(encoded: Any, n: int) -> list[LogitsProcessor]:
    """Those of all rows."""
    _require("sampling", encoded.shape == (n,))
    try:
        return [decode(each) for each in encoded.tolist()]
    except (ValueError, RequestError):
        _require("sampling", False)
        raise


def _within(values: Any, low: int, high: Any) -> bool:
    return bool(((values >= low) & (values < high)).all())


def _require(name: str, holds: bool) -> None:
    if not holds:
        raise RequestError(
            f"The tensor {name} is none that a round of this engine has",
            "This model is internal: send requests to the model dflash.",
        )
