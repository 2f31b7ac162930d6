"""Models that are tables, so that the true distributions are known, and how far draws are off them.

The target's logits depend on the last token, the drafter's on the anchor and the place in the
block. Everything between the tables and the text is the real thing: `verify`, `draft`, acceptance,
random numbers, scheduler.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.logits_processor import LogitsProcessor, weights
from dflash_trt.engines.onnxruntime import Step
from dflash_trt.graphs.drafter import CANDIDATES

VOCAB = 20  # more than the drafter's 16 candidates, so that the cut is tested too
DRAFTS = 3
PROMPT = (3, 5)
CRITICAL_Z = 3.719  # chi-square values are compared with the quantile at 1 - 1e-4
Array = np.ndarray[Any, Any]


def table(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(0, 1.2, (*shape, VOCAB)).astype(np.float32)


def distribution(logits: Array, sampling: SamplingParams) -> Array:
    kept = weights(logits, sampling).astype(np.float64)
    return kept / kept.sum()


class TableModel:
    """An engine without a cache: `look_up(inputs)` gives the logits of all positions."""

    visible_step = 32
    least_rows = 1

    def __init__(self, role: str, best: int) -> None:
        self.info = SimpleNamespace(
            role=role,
            cache_len=1 << 20,
            vocab_size=VOCAB,
            block_size=DRAFTS + 1,
            feature_size=1,
            mask_token_id=0,
            best=best,
            sample_from_anchor=False,
            most_verified=7,
            deepest=DRAFTS,
            quantized=False,
        )

    def look_up(self, inputs: Mapping[str, Array]) -> Array:
        raise NotImplementedError

    def step(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int = 0
    ) -> Step:
        tokens = np.zeros((n, width), np.int64)
        inputs: dict[str, Array] = {
            "tokens": tokens,
            "block": tokens,
            "positions": np.zeros((n, context + width), np.int64),
            "write_index": np.zeros(n, np.int64),
            "mask": np.zeros((n, 1, width, visible), bool),
            "head_rows": np.zeros(scored, np.int64),
            "features": np.zeros((n, context, 1), np.float32),
        }
        outputs: dict[str, Array] = {"features": np.zeros((n, width, 1), np.float32)}

        def run() -> None:
            logits = self.look_up(inputs).reshape(n * width, VOCAB)[inputs["head_rows"]]
            outputs["logits"] = logits
            outputs["top_ids"] = np.argsort(-logits, kind="stable")[:, : self.info.best]
            outputs["top_logits"] = np.take_along_axis(logits, outputs["top_ids"], -1)
            self.finish(inputs, outputs)

        return Step(inputs, outputs, run)

    def finish(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> None:
        pass

    def move_row(self, source: int, destination: int, tokens: int, start: int = 0) -> None:
        pass

    def compact_tokens(self, row: int, start: int, kept: Sequence[int]) -> None:
        pass


class TableTarget(TableModel):
    """Logits of the next token by the last one."""

    def __init__(self) -> None:
        super().__init__("target", best=1)
        self.logits = table(0) + table(1, VOCAB)

    def look_up(self, inputs: Mapping[str, Array]) -> Array:
        return self.logits[inputs["tokens"]]


class TableDrafter(TableModel):
    """Logits by the anchor and the place in the block; drafts are kept about half the time."""

    def __init__(self) -> None:
        super().__init__("drafter", best=CANDIDATES)
        self.logits = table(0) + table(2, VOCAB, DRAFTS + 1)

    def look_up(self, inputs: Mapping[str, Array]) -> Array:
        width = inputs["block"].shape[1]
        return self.logits[inputs["block"][:, 0], :width]


class TablePairDrafter(TableDrafter):
    """As DFlash 2's: a candidate's score depends on the draft before it."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = table(1, VOCAB) + np.float32(0.5) * table(6, VOCAB)

    def finish(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> None:
        ids, n = outputs["top_ids"], len(inputs["block"])
        before = ids.reshape(n, -1, CANDIDATES)
        anchors = np.broadcast_to(inputs["block"][:, :1, None], (n, 1, CANDIDATES))
        before = np.concatenate([anchors, before[:, :-1]], 1).reshape(-1, CANDIDATES, 1)
        outputs["pair_scores"] = outputs["top_logits"][:, None] + self.pairs[before, ids[:, None]]


DRAFTERS = {"plain": TableDrafter, "pairs": TablePairDrafter}


def chi_square(counts: Array, probs: Array) -> float:
    """How many standard deviations too large the statistic is (Wilson-Hilferty).

    counts, probs: [groups, VOCAB], one distribution a group; cells that expect fewer than 5 draws
    are put together. A token of probability 0 may never be drawn.
    """
    statistic, freedom = 0.0, 0
    for observed, p in zip(counts, probs, strict=True):
        assert not observed[p == 0].any(), "a token outside the distribution was drawn"
        expected = p * observed.sum()
        small = expected < 5
        cells = [*zip(observed[~small], expected[~small], strict=True)]
        if expected[small].sum() >= 5:
            cells.append((observed[small].sum(), expected[small].sum()))
        if len(cells) > 1:
            kept = sum(e for _, e in cells)
            total = sum(o for o, _ in cells)
            statistic += sum((o - e * total / kept) ** 2 / (e * total / kept) for o, e in cells)
            freedom += len(cells) - 1
    assert freedom > 0, "too few draws"
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def excess(before: Array, tokens: Array, sampling: SamplingParams) -> float:
    """`chi_square` of tokens drawn after the tokens `before`, one distribution for each."""
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (before, tokens), 1)
    seen = np.flatnonzero(counts.any(axis=1))
    target = TableTarget()
    probs = [distribution(target.logits[token], sampling) for token in seen]
    return chi_square(counts[seen], np.array(probs))


def excess_by_place(texts: Array, committed: Array, sampling: SamplingParams) -> list[float]:
    """Of the prompt's own token, then of the first, second and third that the round committed.

    texts `[n, 1 + DRAFTS + 1]`, the prompt's own token first; committed `[n]`: by the round.
    """
    texts = np.column_stack([np.full(len(texts), PROMPT[-1]), texts])
    return [
        excess(rows[:, place], rows[:, place + 1], sampling)
        for place in range(4)
        for rows in [texts[committed >= place]]
    ]


CUT = SamplingParams(0.8, top_k=8, top_p=0.9, min_p=0.05)
PENALISED = SamplingParams(1.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.4)


def penalized_excess(texts: Array, committed: Array, place: int) -> float:
    """`excess` of a token of PENALISED rounds, given all before it."""
    processor, target = LogitsProcessor(PENALISED, len(PROMPT), ()), TableTarget()
    counts: dict[tuple[int, ...], Array] = {}
    for row in texts[committed > place]:
        before = tuple(row[: place + 1].tolist())
        counts.setdefault(before, np.zeros(VOCAB))[row[place + 1]] += 1
    probs = []
    for before in counts:
        history = [*PROMPT, *before]
        kept = processor.weights(target.logits[before[-1]], len(history), history)
        probs.append(kept / kept.sum(dtype=np.float64))
    return chi_square(np.array(list(counts.values())), np.array(probs))
