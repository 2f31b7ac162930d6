"""Whether a round's tensors stay within an engine's rows, lengths and tokens.

Nobody but the front sends any, and it sends none that do not: what fails here is a crafted call or
a bug, and is refused before a row is touched.
"""

from typing import Any

import numpy as np

from dflash_trt.decoding.messages import (
    DROPPED,
    FORGOTTEN,
    DraftInput,
    Int64,
    VerifyInput,
    moves_of,
)
from dflash_trt.decoding.rules import Rules, decode
from dflash_trt.engines.info import EngineInfo
from dflash_trt.errors import RequestError


def check_verify_input(info: EngineInfo, x: VerifyInput) -> None:
    """RequestError unless `rounds.verify` can run it on a target's engine."""
    n = _check_rows(info, x.batch, x.rows)
    width = x.tokens.shape[-1]
    _require("tokens", x.tokens.shape == (n, width) and 1 <= width <= info.widest)
    _require("tokens", _within(x.tokens, 0, info.vocab_size))
    rows = x.rows.tolist()
    drafts = max(length - forced for length, forced, _, _ in rows)
    _require("rows", all(1 <= forced <= length <= width for length, forced, _, _ in rows))
    _require("rows", drafts < info.most_verified)
    _require("rows", all(place + width <= info.cache_len for _, _, place, _ in rows))
    trees = x.parents.shape[-1] > 1
    _require("parents", x.parents.shape in ((n, 1), (n, width)))
    if trees:
        _require("parents", all(forced == 1 for _, forced, _, _ in rows))
        before = np.maximum(np.arange(width), 1)  # a parent comes before its children
        _require("parents", _within(x.parents, 0, before))
    rules = _rules(x.rules, n)
    if any(each.score_prompt(line[2]) for each, line in zip(rules, rows, strict=True)):
        _require("rows", n == 1 and rows[0][1] == rows[0][0] < info.most_verified)
    for each in rules:
        words = each.sampling.bad_words
        ids = [*each.stop_ids, *(token for word in words for token in word)]
        _require("rules", all(words) and all(0 <= token < info.vocab_size for token in ids))
    _require("history", x.history.shape[:-1] == (n,) and x.history.shape[-1] <= info.cache_len)
    _require("history", _within(x.history, -1, info.vocab_size))
    _check_uniforms(x.uniforms, n, drafts if any(r.sampling.temperature for r in rules) else 0)
    shape = x.candidate_ids.shape
    _require("candidate_ids", len(shape) == 3 and shape[0] == n and min(shape) >= 1)
    _require("candidate_ids", _within(x.candidate_ids, 0, info.vocab_size))
    _require("candidate_probs", x.candidate_probs.shape == shape)
    if x.uniforms.shape[1] == 1:
        return
    for i, (length, forced, _, _) in enumerate(rows):
        if (
            rules[i].sampling.temperature and length > forced
        ):  # each draft was one of its candidates
            drawn = x.tokens[i, forced:length, None]
            known = shape[1] >= len(drawn) and (x.candidate_ids[i, : len(drawn)] == drawn).any(1)
            _require("candidate_ids", bool(np.all(known)))


def check_draft_input(info: EngineInfo, x: DraftInput) -> None:
    """RequestError unless `rounds.draft` can run it on a drafter's engine."""
    n = _check_rows(info, x.batch, x.rows)
    context = x.features.shape[1] if x.features.ndim == 3 else 0
    _require("features", x.features.shape == (n, context, info.feature_size) and context >= 1)
    _require("results", x.results.ndim == 2 and len(x.results) == n and x.results.shape[1] >= 3)
    wanted = int(x.batch[1])
    room = info.cache_len - context - info.block_size
    lines = zip(x.rows.tolist(), x.results.tolist(), strict=True)
    for (length, forced, place, _), (accepted, token, older, *_) in lines:
        _require("rows", 1 <= forced <= length)
        _require("results", -1 <= accepted <= length - forced and token >= 0)
        _require("results", 0 <= older <= place)
        if wanted > 0:
            _require("features", place - older <= room and older + forced + accepted <= context)
    drawn = any(rules.sampling.temperature for rules in _rules(x.rules, n))
    drafts = min(max(wanted, 0), info.block_size - 1)
    _check_uniforms(x.uniforms, n, drafts if drawn and not x.batch[2] else 0, needed=drawn)


def _check_rows(info: EngineInfo, batch: Int64, rows: Int64) -> int:
    """Of both steps; returns the number of rows."""
    _require("batch", batch.ndim == 1 and len(batch) >= 3 and len(batch) % 3 == 0)
    first_row, wanted, candidates, *moves = batch.tolist()
    n = len(rows)
    _require("rows", rows.shape == (n, 4) and n >= 1 and bool((rows[:, 2:] >= 0).all()))
    _require("batch", first_row >= 0 and first_row + n <= info.slots)
    _require("batch", wanted >= DROPPED and candidates >= 0)
    for source, destination, tokens in moves_of(moves):
        _require("batch", 0 <= source < info.slots and FORGOTTEN <= destination < info.slots)
        _require("batch", 0 <= tokens <= info.cache_len)
    return n


def _rules(encoded: Any, n: int) -> list[Rules]:
    """Those of all rows."""
    _require("rules", encoded.shape == (n,))
    try:
        found = [decode(each) for each in encoded.tolist()]
    except (ValueError, RequestError):
        found = []
    _require("rules", len(found) == n)
    return found


def _check_uniforms(uniforms: Any, n: int, drafts: int, needed: bool = False) -> None:
    """Either one for each row, or enough of them to accept and draw so many drafts."""
    size = uniforms.shape[-1]
    _require("uniforms", uniforms.shape == (n, size) and size % 2 == 1)
    _require("uniforms", size // 2 >= drafts or (size == 1 and not needed))
    _require("uniforms", bool((uniforms >= 0).all() and (uniforms < 1).all()))


def _within(values: Any, low: int, high: Any) -> bool:
    return bool(((values >= low) & (values < high)).all())


def _require(name: str, holds: bool) -> None:
    if not holds:
        raise RequestError(
            f"The tensor {name} is none that a round of this engine has",
            "This model is internal: send requests to the model dflash.",
        )
