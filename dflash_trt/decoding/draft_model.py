"""An ordinary small language model as drafter, one token after the other.

Leviathan et al. 2023; greedy, whatever the request samples.
"""

import time
from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import (
    DraftOutput,
    VerifyInput,
    VerifyOutput,
    no_drafts,
    verify_input,
)
from dflash_trt.decoding.rounds import copy_slots, verify
from dflash_trt.engines import Engine


class DraftModel:
    """An `in_process.Propose` on a target's engine that has the same tokens, and at least the same
    slots of at least the same length."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, x: VerifyInput, checked: VerifyOutput) -> DraftOutput:
        start = time.perf_counter()
        first_slot, num_draft_tokens, _, *copies = x.batch.tolist()
        if num_draft_tokens <= 0:
            copy_slots(self._engine, copies)
            return no_drafts(len(x.rows))
        prefilling = not all(budget for _, _, _, budget in x.rows.tolist())
        lines, places = [], []
        for (_, known, place, _), tokens, (accepted, token, *_) in zip(
            x.rows.tolist(), x.tokens.tolist(), checked.results.tolist(), strict=True
        ):
            lines.append(tokens[: known + max(accepted, 0)] + [token] * (not prefilling))
            places.append(place)
        drafts = []
        for _ in range(1 if prefilling else num_draft_tokens):
            following = self._next(lines, places, [first_slot, 0, 0, *copies])
            drafts.append(following)
            places = [place + len(line) for place, line in zip(places, lines, strict=True)]
            lines, copies = [[token] for token in following], []
        if prefilling:
            return no_drafts(len(lines))
        ids = np.array(drafts).T[..., None]
        return DraftOutput(ids, np.ones(ids.shape, np.float32), time.perf_counter() - start)

    def _next(
        self, lines: Sequence[list[int]], places: Sequence[int], batch: Sequence[int]
    ) -> list[int]:
        """The token after each line, which stands at its place: prefilling is verifying."""
        last = self._engine.info.vocab_size - 1  # the target's padding may be longer
        lines = [[min(token, last) for token in line] for line in lines]
        rows = [[len(y), len(y), p, 1] for y, p in zip(lines, places, strict=True)]
        results = verify(self._engine, verify_input(batch, rows, lines)).results
        return [token for _, token, *_ in results.tolist()]
