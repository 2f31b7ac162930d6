"""How many drafts a round should ask for: measured costs against observed acceptance."""

import time

import numpy as np

from dflash_trt.decoding.messages import RunRound, VerifyInput, no_candidates, no_rules

MEMORY = 0.98  # weight of the past at each round: about the last 50 count
FULL_EVERY = 64  # now and then a full block is drafted, so that long drafts are observed too
WARM_UP = 8  # full blocks before the first choice


class DraftLength:
    """Chooses the number of draft tokens, 1 .. block_size-1, or keeps a fixed one.

    A round with k drafts commits 1 + sum_{j<=k} P(the first j are accepted) tokens on average and
    takes `seconds(n, k)`; the k with the best ratio wins.
    """

    def __init__(self, block_size: int, fixed: int | None = None) -> None:
        self.longest = block_size - 1 if fixed is None else fixed
        self._fixed = fixed is not None
        # draft j was reached / kept, given that all before it were; the prior is weak and hopeful
        self._reached = [2.0] * self.longest
        self._kept = [1.5] * self.longest
        self._rounds = 0
        self._costs: list[tuple[float, float]] = []  # of each length: at the start, per row

    @property
    def needs_costs(self) -> bool:
        """Whether `measure` should run before the first request."""
        return not self._fixed and not self._costs

    def set_costs(self, one: list[float], many: list[float], rows: int) -> None:
        """Seconds of a round with 1, 2, .. drafts for one sequence, and for `rows` sequences."""
        self._costs = []
        for first, all_rows in zip(one, many, strict=True):
            per_row = max(all_rows - first, 0.0) / max(rows - 1, 1)
            self._costs.append((max(first - per_row, 0.0), per_row))

    def choose(self, n: int) -> int:
        """Draft tokens for the next round of n sequences."""
        self._rounds += 1
        if self._fixed or not self._costs:
            return self.longest
        if self._rounds <= WARM_UP or self._rounds % FULL_EVERY == 0:
            return self.longest
        committed = chance = 1.0
        rates = []
        for j, (base, per_row) in enumerate(self._costs):
            chance *= self._kept[j] / self._reached[j]
            committed += chance
            rates.append(committed / (base + per_row * n))
        return 1 + rates.index(max(rates))

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from one sequence's round."""
        if self._fixed:
            return
        for j in range(min(accepted + 1, drafted)):
            self._reached[j] = self._reached[j] * MEMORY + 1.0
            self._kept[j] = self._kept[j] * MEMORY + (j < accepted)


def measure(run_round: RunRound, length: DraftLength, block_size: int, slots: int) -> None:
    """Time rounds of every length on idle cache rows and hand the costs to `length`.

    To be called while no sequence is active: it writes to rows 0 .. slots-1.
    """
    one, many = (
        [_seconds(run_round, n, k, block_size) for k in range(1, block_size)] for n in (1, slots)
    )
    length.set_costs(one, many, slots)


def _seconds(run_round: RunRound, n: int, drafts: int, block_size: int, repeats: int = 7) -> float:
    """Median wall time of one round of n sequences with the given number of drafts."""
    rules, uniforms, history = no_rules(n)
    ids, probs = no_candidates(n)
    x = VerifyInput(
        batch=np.array([0, drafts]),
        rows=np.array([[drafts + 1, 1, 0, 2 * block_size]] * n),
        tokens=np.zeros((n, drafts + 1), np.int64),
        rules=rules,
        uniforms=uniforms,
        history=history,
        candidate_ids=ids,
        candidate_probs=probs,
    )
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run_round(x)
        times.append(time.perf_counter() - start)
    return float(np.median(times))
