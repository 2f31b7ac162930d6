"""Acceptance of drafts: those equal to the target's own greedy or sampled token. Lossless.

This is no rejection sampling: the target's token is drawn by seeded Gumbel-max, whatever the drafts
are, and the drafter's probabilities are not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.logits_processor import LogitsProcessor, decode_processor, tempered
from dflash_trt.decoding.messages import NO_HISTORY, Float32, Int32, VerifyInput
from dflash_trt.decoding.sampling import NO_TOKEN, sample

Bools = npt.NDArray[np.bool_]
Accepted = tuple[int, int]  # number of accepted drafts of a row, and the target's token after them


def accept(
    x: VerifyInput, greedy_ids: Sequence[Sequence[int]], logits: Float32
) -> list[Accepted | None]:
    """Accept each row's drafts up to the first that differs from the target's choice.

    greedy_ids `[n, D + 1]`: the target's likeliest token after the anchor and each draft, NO_TOKEN
    where its logits are not finite. logits `[n, D + 1, vocab]`. A row's result is None if at a
    place it needs its logits are not finite or no token is allowed.
    """
    kept: list[Accepted | None] = [None] * len(greedy_ids)
    rows: list[_SampledRow] = []
    lines = zip(x.rows.tolist(), x.tokens.tolist(), x.sampling.tolist(), strict=True)
    for i, ((length, known, place, *_), tokens, encoded) in enumerate(lines):
        drafts = tokens[known:length]
        allowed = None if (x.masks[i] == -1).all() else _unpack_masks(x.masks[i], logits.shape[2])
        processor = decode_processor(encoded)
        if processor.greedy:
            best = greedy_ids[i]
            if allowed is not None:
                best = _likeliest_allowed(best, logits[i], allowed)
            kept[i] = accept_greedy(drafts, best)
            continue
        history = history_to_anchor(x, i) if processor.needs_history else []
        rows.append(_SampledRow(i, processor, place + known, drafts, allowed, history))
    while rows:
        going = []
        for row, token in zip(rows, _sample_next(rows, logits), strict=True):
            if greedy_ids[row.i][row.accepted] == NO_TOKEN or token == NO_TOKEN:
                continue
            if row.accepted < len(row.drafts) and row.drafts[row.accepted] == token:
                row.accepted += 1
                going.append(row)
            else:
                kept[row.i] = row.accepted, token
        rows = going
    return kept


def accept_greedy(drafts: Sequence[int], greedy_ids: Sequence[int]) -> Accepted | None:
    """Accept drafts; greedy_ids has at least one token more."""
    count = 0
    while count < len(drafts) and drafts[count] == greedy_ids[count]:
        count += 1
    return None if greedy_ids[count] == NO_TOKEN else (count, greedy_ids[count])


@dataclass(slots=True)
class _SampledRow:
    i: int
    processor: LogitsProcessor
    next_position: int  # in the text, of the token after the anchor
    drafts: Sequence[int]
    allowed: Bools | None  # by the grammar, `[D + 1, vocab]`; None: any token
    history: list[int]  # up to the anchor, if needed
    accepted: int = 0  # drafts so far


def _sample_next(rows: Sequence[_SampledRow], logits: Float32) -> list[int]:
    flat = logits.reshape(-1, logits.shape[2])
    weights = flat.take([row.i * logits.shape[1] + row.accepted for row in rows], 0)
    params = [row.processor.sampling for row in rows]
    positions = [row.next_position + row.accepted for row in rows]
    for line, row in zip(weights, rows, strict=True):
        if row.allowed is not None:
            line[~row.allowed[row.accepted]] = -np.inf
    if all(row.processor.only_temperature for row in rows):
        weights = tempered(weights, [each.temperature for each in params])
    else:
        for j, row in enumerate(rows):
            before = [*row.history, *row.drafts[: row.accepted]]
            weights[j] = row.processor.weights(weights[j], positions[j], before)
    return sample(weights, [each.seed for each in params], positions)


def _unpack_masks(masks: Int32, vocab: int) -> Bools:
    """Unpack grammar masks into booleans `[D + 1, vocab]`."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=vocab)
    return bits.view(np.bool_)


def _likeliest_allowed(greedy_ids: Sequence[int], logits: Float32, allowed: Bools) -> list[int]:
    """Return the likeliest allowed tokens; NO_TOKEN where none is allowed."""
    best = list(greedy_ids)
    for i, token in enumerate(greedy_ids[: len(allowed)]):
        if token != NO_TOKEN and not allowed[i, token]:
            line = np.where(allowed[i], logits[i], -np.inf)
            best[i] = int(line.argmax()) if allowed[i].any() else NO_TOKEN
    return best


def history_to_anchor(x: VerifyInput, i: int) -> list[int]:
    before = [token for token in x.history[i].tolist() if token != NO_HISTORY]
    before += x.tokens[i, : x.rows[i, 1]].tolist()
    return before
