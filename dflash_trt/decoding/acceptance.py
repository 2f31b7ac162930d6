"""Acceptance of drafts: keep those equal to the target's greedy or sampled token. Lossless."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.logits_processor import LogitsProcessor, decode, tempered
from dflash_trt.decoding.messages import NO_HISTORY, Float32, Int32, VerifyInput
from dflash_trt.decoding.sampling import NO_TOKEN, sample
from dflash_trt.decoding.speculation import walk

AT_ONCE = 2**15  # largest number of logits for which sampling all nodes at once is faster
Bools = npt.NDArray[np.bool_]
Accepted = tuple[Sequence[int], int]  # accepted drafts of a row (1: the first), and the next token


def accept(x: VerifyInput, own: Sequence[Sequence[int]], logits: Float32) -> list[Accepted | None]:
    """Accept drafts of each row from the anchor on, as long as one equals the target's choice.

    own `[n, D + 1]`: the target's likeliest token after the anchor and each draft, NO_TOKEN where
    its logits are not finite. logits `[n, D + 1, vocab]`. A row's result is None if its logits are
    not finite at a place it needs.
    """
    kept: list[Accepted | None] = [None] * len(own)
    rows: list[_Row] = []
    lines = zip(x.rows.tolist(), x.tokens.tolist(), x.sampling.tolist(), strict=True)
    for i, ((length, known, place, _), tokens, encoded) in enumerate(lines):
        drafts = tokens[known:length]
        allowed = None if (x.masks[i] == -1).all() else _bits(x.masks[i], logits.shape[2])
        processor = decode(encoded)
        sampled = not processor.greedy
        best = own[i] if allowed is None or sampled else _best(own[i], logits[i], allowed)
        if not sampled and x.parents.shape[1] == 1:
            kept[i] = accept_greedy(drafts, best)
            continue
        row = _Row(i, processor, place + known, drafts, parents_of(x, i), allowed)
        if not sampled:
            row.chosen.update(enumerate(best))
        elif row.processor.needs_history:
            row.history = history_of(x, i)
        rows.append(row)
    at_once = logits.size <= AT_ONCE
    asked = [(row, path) for row in rows if not row.chosen for path in row.first_paths(at_once)]
    while rows:
        for (row, path), token in zip(asked, _sample(asked, logits), strict=True):
            node = _node(path)
            row.chosen[node] = NO_TOKEN if own[row.i][node] == NO_TOKEN else token
        asked = []
        for row in rows:
            path, found = walk(row.drafts, row.parents, row.token_after)
            if found is None:
                asked.append((row, path))
            elif found != NO_TOKEN:
                kept[row.i] = path, found
        rows = [row for row, _ in asked]
    return kept


def accept_greedy(drafts: Sequence[int], own: Sequence[int]) -> Accepted | None:
    """Accept one chain greedily; own has at least one token more than drafts."""
    count = 0
    while count < len(drafts) and drafts[count] == own[count]:
        count += 1
    return None if own[count] == NO_TOKEN else (range(1, count + 1), own[count])


@dataclass(slots=True)
class _Row:
    """The drafts of one row and what the target chooses after them."""

    i: int
    processor: LogitsProcessor
    next_position: int  # in the text, of the token after the anchor
    drafts: Sequence[int]
    parents: Sequence[int]
    allowed: Bools | None  # by the grammar, `[D + 1, vocab]`; None: any token
    history: list[int] = field(default_factory=list)  # up to the anchor, if needed
    chosen: dict[int, int] = field(default_factory=dict)  # by the target, after each node

    def first_paths(self, at_once: bool) -> list[list[int]]:
        """Return the paths to sample first: all nodes if cheap, otherwise the anchor alone."""
        found: list[list[int]] = [[]]
        if at_once and self.processor.only_temperature:
            for node, parent in enumerate(self.parents, 1):
                found.append([*found[parent], node])
        return found

    def token_after(self, path: Sequence[int]) -> int | None:
        return self.chosen.get(_node(path))


def _node(path: Sequence[int]) -> int:
    return path[-1] if path else 0


def _sample(asked: Sequence[tuple[_Row, list[int]]], logits: Float32) -> list[int]:
    """Sample the target's token after each path."""
    if not asked:
        return []
    flat = logits.reshape(-1, logits.shape[2])
    weights = flat.take([row.i * logits.shape[1] + _node(path) for row, path in asked], 0)
    params = [row.processor.sampling for row, _ in asked]
    positions = [row.next_position + len(path) for row, path in asked]
    for line, (row, path) in zip(weights, asked, strict=True):
        if row.allowed is not None:
            line[~row.allowed[_node(path)]] = -np.inf
    if all(row.processor.only_temperature for row, _ in asked):
        weights = tempered(weights, [each.temperature for each in params])
    else:
        for j, (row, path) in enumerate(asked):
            before = row.history + [row.drafts[node - 1] for node in path]
            weights[j] = row.processor.weights(weights[j], positions[j], before)
    return sample(weights, [each.seed for each in params], positions)


def _bits(masks: Int32, vocab: int) -> Bools:
    """Unpack grammar masks into booleans `[D + 1, vocab]`."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=vocab)
    return bits.view(np.bool_)


def _best(own: Sequence[int], logits: Float32, allowed: Bools) -> list[int]:
    """Return the likeliest allowed tokens; NO_TOKEN where none is allowed."""
    best = list(own)
    for node, token in enumerate(own[: len(allowed)]):
        if token != NO_TOKEN and not allowed[node, token]:
            line = np.where(allowed[node], logits[node], -np.inf)
            best[node] = int(line.argmax()) if allowed[node].any() else NO_TOKEN
    return best


def history_of(x: VerifyInput, i: int) -> list[int]:
    """Return the tokens of row i up to its anchor."""
    before = [token for token in x.history[i].tolist() if token != NO_HISTORY]
    before += x.tokens[i, : x.rows[i, 1]].tolist()
    return before


def parents_of(x: VerifyInput, i: int) -> Sequence[int]:
    """Return the parent of each draft of row i: 0 is the anchor, 1 the first draft."""
    length, known, _, _ = x.rows[i].tolist()
    if x.parents.shape[1] == 1:
        return range(length - known)
    parents: list[int] = x.parents[i, 1:length].tolist()
    return parents
