"""Temperature above 0: committed tokens follow the target's distribution, whoever proposes.

The models are those of `tables`.
"""

from dataclasses import replace
from typing import Any

import dflash.model as zlab
import numpy as np
import pytest
import torch
from tables import (
    CRITICAL_Z,
    CUT,
    DRAFTS,
    PENALISED,
    PROMPT,
    VOCAB,
    Array,
    TableDrafter,
    TablePairDrafter,
    TableTarget,
    chi_square,
    distribution,
    excess_by_place,
    penalized_excess,
    table,
)

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import Request, SamplingParams, Scheduler, in_process
from dflash_trt.decoding.acceptance import accept_greedy
from dflash_trt.decoding.logits_processor import tempered, truncate
from dflash_trt.decoding.sampling import NO_TOKEN, noise, sample
from dflash_trt.decoding.speculation import Adaptive, Fixed, strategy

DRAWS = 6_000


class SlowSteps:
    """Costs by which everything that can be proposed is worth its while."""

    def verify(self, n: int, width: int, context: int) -> float:
        return 1e3 + width

    def draft(self, n: int, context: int) -> float:
        return 1.0


def repeating() -> tuple[int, ...]:
    """A prompt in which each token is followed by a likely one: there is always one to look up."""
    logits = TableTarget().logits.copy()
    tokens = [PROMPT[-1]]
    while len(tokens) < VOCAB:
        logits[:, tokens[-1]] = -np.inf
        tokens.append(int(logits[tokens[-1]].argmax()))
    return (*tokens, *PROMPT)


class BrokenDrafter(TableDrafter):
    """Its logits are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.logits[:] = np.nan


# by who proposes: the drafter, and what of the adaptive policy is on; None: the policy fixed
KINDS: dict[str, tuple[type[TableDrafter], dict[str, bool] | None]] = {
    "chain": (TableDrafter, None),
    "pairs": (TablePairDrafter, None),
    "broken": (BrokenDrafter, None),
    "tree": (TableDrafter, {"lookup": False}),
    "lookup": (TableDrafter, {"tree": False}),
}


def scheduler_of(kind: str, slots: int = 16) -> Scheduler:
    target = TableTarget()
    options: dict[str, Any] = {"policy": Fixed(0)}
    rounds = in_process(target, None)  # type: ignore[arg-type]
    if kind != "plain":
        drafter, sources = KINDS[kind]
        rounds = in_process(target, drafter())  # type: ignore[arg-type]
        fixed = Speculation(policy="fixed", draft_tokens=DRAFTS)
        speculation = fixed if sources is None else Speculation(**sources)
        policy, proposer = strategy(speculation, target.info, SlowSteps())  # type: ignore[arg-type]
        options = {"policy": policy, "proposer": proposer}
    return Scheduler(rounds, slots=slots, max_seq_len=64, prefill_chunk=64, **options)


@pytest.fixture(autouse=True)
def costs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `SlowSteps`, whatever time rounds take."""
    monkeypatch.setattr(Adaptive, "timed", lambda *_: None)


# --- rounds ---------------------------------------------------------------------------------------


def first_rounds(sampling: SamplingParams, kind: str, draws: int) -> tuple[Array, Array]:
    """`draws` times a prompt and the rounds after it, each with its own seed.

    Returns the tokens `[draws, 1 + DRAFTS + 1]`, the prompt's own first, and how many of them the
    first round committed.
    """
    scheduler = scheduler_of(kind, slots=200)
    prompt = repeating() if kind == "lookup" else PROMPT
    sequences = [
        scheduler.submit(Request(prompt, DRAFTS + 2, replace(sampling, seed=seed)))
        for seed in range(draws)
    ]
    verified: list[str] = []
    while scheduler.busy:
        scheduler.step()
        assert scheduler.report is not None
        verified += scheduler.report.choices
    proposed = [each for each in verified if each != "plain"]
    assert proposed.count({"pairs": "chain"}.get(kind, kind)) > 0.5 * len(proposed)
    committed = np.array([sequence.committed_per_round[0] for sequence in sequences])
    assert (committed > 1).mean() > 0.1
    return np.array([sequence.tokens for sequence in sequences]), committed


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        pytest.param(SamplingParams(1.0), "chain", id="chain"),
        pytest.param(CUT, "pairs", id="cut-pairs", marks=pytest.mark.models),
        pytest.param(CUT, "lookup", id="cut-lookup", marks=pytest.mark.models),
        pytest.param(SamplingParams(1.0), "tree", id="tree", marks=pytest.mark.models),
    ],
)
def test_committed_tokens_follow_the_target(sampling: SamplingParams, kind: str) -> None:
    texts, committed = first_rounds(sampling, kind, DRAWS)
    for place, z in enumerate(excess_by_place(texts, committed, sampling)):
        assert z < CRITICAL_Z, f"token {place} does not follow the target: z = {z:.1f}"


@pytest.mark.models
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_penalized_tokens_follow_the_target(kind: str) -> None:
    """Penalties depend on the drafts before, too: the first two tokens of a round, given those."""
    texts, committed = first_rounds(PENALISED, kind, DRAWS)
    for place in (0, 1):
        z = penalized_excess(texts, committed, place)
        assert z < CRITICAL_Z, f"token {place + 1} does not follow the target: z = {z:.1f}"


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_distribution_is_zlabs(temperature: float, top_k: int, top_p: float) -> None:
    for seed in range(20):
        logits = 3 * table(100 + seed)
        ours = distribution(logits, SamplingParams(temperature, top_k, top_p))
        theirs = zlab._sampling_probs(torch.from_numpy(logits), temperature, top_p, top_k).numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert ours.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(1.0), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(1.0, top_k=2), [0.625, 0.375, 0, 0]),
        # 0.5 alone is short of 0.6; the token that reaches the mass is kept
        (SamplingParams(1.0, top_p=0.6), [0.625, 0.375, 0, 0]),
        (SamplingParams(1.0, top_p=0.01), [1, 0, 0, 0]),
        # top-p counts the mass that top-k left: 0.625 and 0.375
        (SamplingParams(1.0, top_k=2, top_p=0.6), [1, 0, 0, 0]),
        (SamplingParams(1.0, min_p=0.5), [0.625, 0.375, 0, 0]),
        (SamplingParams(0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (SamplingParams(), [1, 0, 0, 0]),
    ],
)
def test_distribution_by_hand(sampling: SamplingParams, expected: list[float]) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    np.testing.assert_allclose(distribution(logits, sampling), expected, 1e-5)


def test_extreme_logits_stay_a_distribution() -> None:
    logits = np.array([-1e30, 0.0, 1e30, -np.inf], np.float32)
    for sampling in (SamplingParams(1e-4), SamplingParams(1.0, 3, 0.5), SamplingParams(100.0)):
        assert distribution(logits, sampling).tolist() == [0, 0, 1, 0]


def test_many_lines_are_cut_as_each_alone() -> None:
    lines = tempered(table(1, 12), [0.9] * 12).reshape(3, 4, VOCAB)
    sampling = SamplingParams(0.9, top_k=9, top_p=0.8, min_p=0.1)
    alone = np.array([[truncate(line.copy(), sampling) for line in each] for each in lines])
    assert (truncate(lines.copy(), sampling) == alone).all()
    assert 1 < (alone > 0).sum(-1).mean() < 9


# --- seeded Gumbel-max ----------------------------------------------------------------------------


def test_rows_are_sampled_as_if_alone() -> None:
    """A text must not depend on what else is running; a row without numbers hurts no other."""
    rng = np.random.default_rng(0)
    for vocab in (2, 31, 512, 5000):
        logits = rng.normal(0, 3, (40, vocab)).astype(np.float32)
        temperatures = rng.uniform(0.2, 3, 40).tolist()
        w = tempered(logits, temperatures)
        w[7] = np.nan
        sampled = sample(w, range(40), range(100, 140))
        for i, token in enumerate(sampled):
            alone = tempered(logits[i][None], [temperatures[i]])
            assert (sample(alone, [i], [100 + i]) == [token]) == (i != 7)
        assert sampled[7] == NO_TOKEN


@pytest.mark.parametrize("by", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (0, 1, -1), (2, 7, 0)])
@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**62])
def test_noise_is_independent(by: tuple[int, int, int], seed: int) -> None:
    """Of neighbors: seeds, positions, tokens. 40,000 pairs, all values alike likely."""
    seeds, positions, ids = range(seed, seed + 20), range(100, 140), np.arange(50)
    each, other = (
        np.array(
            [noise(s + ds, [p + dp for p in positions], np.tile(ids + di, (40, 1))) for s in seeds]
        )
        for ds, dp, di in ((0, 0, 0), by)
    )
    a, b = (np.exp(-np.exp(-x)).ravel() for x in (each, other))
    cells = np.bincount((a * 8).astype(int) * 8 + (b * 8).astype(int), minlength=64)
    assert chi_square(cells[None], np.full((1, 64), 1 / 64)) < CRITICAL_Z


def test_tokens_of_little_weight_have_theirs() -> None:
    """Most of a distribution in thousands of tokens that share their noise, some likelier."""
    w = np.full(8_000, 1e-4, np.float32)
    w[:4] = [1.0, 0.3, 0.1, 0.02]
    w[4::2] *= 2
    w[5::8] = 0  # never sampled
    seeds = np.repeat(np.arange(2000), 10).tolist()
    sampled = np.array([sample(w[None], [seed], [i % 10])[0] for i, seed in enumerate(seeds)])
    ids = np.arange(len(w))
    for among in (ids % 16, ids // 500):  # tokens of all numbers, and neighbors
        groups = np.where(ids < 4, ids, 4 + among)
        counts, probs = np.bincount(groups[sampled], minlength=20), np.bincount(groups, w)
        assert chi_square(counts[None], probs[None] / probs.sum()) < CRITICAL_Z


def test_greedy_acceptance() -> None:
    own = [4, 5, 6, 7]
    for drafts, kept, token in (
        ([4, 5, 6], 3, 7),
        ([4, 9, 6], 1, 5),
        ([9, 5, 6], 0, 4),
        ([4, 5], 2, 6),  # fewer drafts than the neighbors: what comes after them is padding
        ([], 0, 4),
    ):
        assert accept_greedy(drafts, own) == (range(1, kept + 1), token)
    assert accept_greedy([4, 5], [4, NO_TOKEN, 6]) is None
