"""Drafts weighed by which tokens follow one another: DFlash fills the places of a block at once,
each as if it did not know the others.

The counted form of the pair scores that a DFlash 2 drafter learns (`dflash` 0.1.0,
`CandidateSelector`).
"""

from array import array
from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import Float32, Int64

CELLS = 2**18  # of the table of pairs; that of tokens has as many
READY = 4_000  # pairs seen before they are worth anything
LEAST = 4  # times that a token was seen, for what followed it to count
SMOOTHING = 8.0  # imagined pairs with each token, spread as tokens are
TINY = np.float32(1e-30)
_APART = 162013  # CELLS over the golden ratio: rows of a small vocabulary hardly share cells


class Pairs:
    """How often a token followed another in what was committed: hashed, bounded, decaying.

    2 MiB whatever the vocabulary. Pairs that share a cell are counted together. Once as many pairs
    were counted as there are cells all counts are halved, and what was seen once is forgotten.
    """

    def __init__(self) -> None:
        self._pair_items, self._first_items = (array("f", bytes(4 * CELLS)) for _ in range(2))
        # the same memory: an array's items are quicker to change one by one
        self._pairs: Float32 = np.frombuffer(self._pair_items, np.float32)
        self._firsts: Float32 = np.frombuffer(self._first_items, np.float32)
        self._counted = 0

    @property
    def ready(self) -> bool:
        """Whether enough was seen to call `reweigh`."""
        return self._counted >= READY

    def observe(self, tokens: Sequence[int]) -> None:
        """Count a run of committed tokens, with the one before it in front."""
        pairs, firsts = self._pair_items, self._first_items
        first = tokens[0]
        for token in tokens[1:]:
            pairs[(first * _APART + token) % CELLS] += 1.0
            firsts[first % CELLS] += 1.0
            first = token
        self._counted += len(tokens) - 1
        if self._counted >= CELLS:
            for counts in (self._pairs, self._firsts):
                np.floor(counts / 2, out=counts)
            self._counted = int(self._firsts.sum())

    def reweigh(self, ids: Int64, probs: Float32) -> Float32:
        """Probabilities `[n, D, k, k]`: of candidate j of a place if candidate i is taken before.

        ids, probs `[n, D, k]`: each place's candidates, 8 will do, and what the drafter gives them.
        With its q_d(x), its candidates y of the place before and P(x|y) as counted,

            q'(x|y) = q_d(x) P(x|y) / (sum_y' q_{d-1}(y') P(x|y') / sum_y' q_{d-1}(y'))

        scaled to the sum of q_d: what tells y from the others is new to the drafter, the rest it
        knew. A y seen too seldom is in no sum and leaves q_d as it is. The anchor was known, too:
        the first place stays as it was, all its i alike.
        """
        n, depth, k = ids.shape
        weighed = np.empty((n, depth, k, k), np.float32)
        weighed[:] = probs[:, :, None]
        masked = ids & (CELLS - 1)
        seen = self._firsts.take(masked)
        # a token that was never seen is possible behind each
        spread = (seen[:, 1:] + 0.5) * (SMOOTHING / max(self._counted, 1))
        cells = (masked[:, :-1] * _APART)[..., None] + masked[:, 1:, None]
        cells &= CELLS - 1
        follows = self._pairs.take(cells)
        follows += spread[:, :, None]
        follows /= seen[:, :-1, :, None] + SMOOTHING
        before, unknown = probs[:, :-1], seen[:, :-1] < LEAST
        if unknown.any():
            before = np.where(unknown, TINY, before)
        follows /= before[:, :, None] @ follows + TINY
        follows[unknown] = 1.0
        follows *= weighed[:, 1:]
        # the sum over y' above is a factor of a whole place, which this scaling takes out
        scale = probs[:, 1:].sum(-1)[..., None] / (follows.sum(-1) + TINY)
        follows *= scale[..., None]
        weighed[:, 1:] = follows
        return weighed
