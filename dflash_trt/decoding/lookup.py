"""Prompt lookup: drafts copied from where the last tokens stood before (`--method lookup`)."""

import time
from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import NO_DRAFT, DraftOutput, VerifyInput, VerifyOutput

LONGEST, SHORTEST = 3, 1  # tokens that must be alike, as in transformers' prompt_lookup


class PromptLookup:
    """A `rounds.Propose` that keeps the tokens of each cache row."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}

    def __call__(self, x: VerifyInput, checked: VerifyOutput) -> DraftOutput:
        start = time.perf_counter()
        first_row, wanted, *moves = x.batch.tolist()
        for source, destination in zip(moves[::2], moves[1::2], strict=True):
            self._texts[destination] = list(self._texts[source])
        lines = zip(x.rows.tolist(), x.tokens.tolist(), checked.results.tolist(), strict=True)
        drafts = []
        for row, ((_, forced, place, budget), tokens, (accepted, token)) in enumerate(lines):
            text = self._texts.setdefault(first_row + row, [])
            text[place:] = tokens[: forced + max(accepted, 0)]
            found = continuation([*text, token], wanted) if budget else []
            drafts.append(found + [NO_DRAFT] * (wanted - len(found)))
        ids = np.array(drafts)
        # certain of its drafts: what rejection sampling then keeps is the target's own choice
        certain = np.ones((*ids.shape, 1), np.float32)
        return DraftOutput(ids, ids[..., None], certain, time.perf_counter() - start)


def continuation(text: Sequence[int], most: int) -> list[int]:
    """At most `most` tokens that followed the latest earlier copy of the text's end, if any.

    The longest end that occurs before counts, of `LONGEST` tokens down to `SHORTEST`.
    """
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        end = list(text[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if text[start] == end[0] and list(text[start : start + length]) == end:
                return list(text[start + length : start + length + most])
    return []
