"""An ordinary small language model as drafter, one token after the other (`--method draft-model`).

Leviathan et al. 2023; greedy, whatever the request draws: exact, since a certain draft is.
"""

import time
from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import (
    DraftOutput,
    VerifyInput,
    VerifyOutput,
    chains,
    no_candidates,
    no_rules,
)
from dflash_trt.decoding.rounds import no_drafts, verify
from dflash_trt.engines.step import Engine


class DraftModel:
    """A `rounds.Propose` on a target's engine that has the same vocabulary and at least the same
    cache rows of at least the same length."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, x: VerifyInput, checked: VerifyOutput) -> DraftOutput:
        start = time.perf_counter()
        first_row, wanted, _, *moves = x.batch.tolist()
        drawing = all(budget for _, _, _, budget in x.rows.tolist())  # not while prefilling
        lines, places = [], []
        for (_, forced, place, _), tokens, (accepted, token, *_) in zip(
            x.rows.tolist(), x.tokens.tolist(), checked.results.tolist(), strict=True
        ):
            lines.append(tokens[: forced + max(accepted, 0)] + [token] * drawing)
            places.append(place)
        drafts = []
        for _ in range(wanted if drawing else 1):
            following = self._next(lines, places, [first_row, 0, 0, *moves])
            drafts.append(following)
            places = [place + len(line) for place, line in zip(places, lines, strict=True)]
            lines, moves = [[token] for token in following], []
        if not drawing:
            return no_drafts(len(lines))
        ids = np.array(drafts).T
        certain = np.ones((*ids.shape, 1), np.float32)
        return DraftOutput(ids, ids[..., None], certain, time.perf_counter() - start)

    def _next(
        self, lines: Sequence[list[int]], places: Sequence[int], batch: Sequence[int]
    ) -> list[int]:
        """The token after each line, which stands at its place: prefilling is verifying."""
        width = max(map(len, lines))
        rules, uniforms, history = no_rules(len(lines))
        ids, probs = no_candidates(len(lines))
        x = VerifyInput(
            batch=np.array(batch),
            rows=np.array([[len(y), len(y), p, 1] for y, p in zip(lines, places, strict=True)]),
            tokens=np.array([line + [0] * (width - len(line)) for line in lines]),
            parents=chains(len(lines)),
            rules=rules,
            uniforms=uniforms,
            history=history,
            candidate_ids=ids,
            candidate_probs=probs,
        )
        return [token for _, token, *_ in verify(self._engine, x).results.tolist()]
