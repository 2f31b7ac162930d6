"""Temperature above 0: the committed tokens follow the target's distribution.

The models are tables here, so that the true distributions are known: the target's logits depend on
the last token, the drafter's on the anchor and the place in the block. Everything between the
tables and the text is the real thing: `verify`, `draft`, acceptance, random numbers, scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dflash.model as zlab
import numpy as np
import pytest
import torch

from dflash_trt.decoding import rounds
from dflash_trt.decoding.acceptance import accept_greedy, accept_sampled
from dflash_trt.decoding.draft_length import DraftLength
from dflash_trt.decoding.rounds import VerifyInput, in_process
from dflash_trt.decoding.sampling import CANDIDATES, Sampling, distribution, generator, propose
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request

VOCAB = 20  # more than the drafter's 16 candidates, so that the cut is tested too
DRAFTS = 3
DRAWS = 20_000
DECISIONS = 5_000
BATCH = 400
PROMPT = (3, 5)
CRITICAL_Z = 3.719  # chi-square values are compared with the quantile at 1 - 1e-4
Array = np.ndarray[Any, Any]


def table(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(0, 1.2, (*shape, VOCAB)).astype(np.float32)


class TableTarget:
    """Logits of the next token by the last one; it needs no cache."""

    info = SimpleNamespace(cache_len=1 << 20, vocab_size=VOCAB, block_size=DRAFTS + 1)

    def __init__(self) -> None:
        self.logits = table(0) + table(1, VOCAB)

    def run(self, row: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        logits = self.logits[inputs["tokens"].ravel()[inputs["head_rows"]]]
        return {
            "logits": logits,
            "argmax": logits.argmax(-1),
            "features": np.zeros((*inputs["tokens"].shape, 1), np.float32),
        }

    def move_row(self, source: int, destination: int) -> None:
        pass


class TableDrafter:
    """Logits by the anchor and the place in the block; drafts are kept about half the time."""

    info = SimpleNamespace(
        cache_len=1 << 20, vocab_size=VOCAB, block_size=DRAFTS + 1, mask_token_id=0
    )

    def __init__(self) -> None:
        self.logits = table(0) + table(2, VOCAB, DRAFTS + 1)

    def run(self, row: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        n, width = inputs["block"].shape
        logits = self.logits[inputs["block"][:, 0], :width].reshape(n * width, VOCAB)
        logits = logits[inputs["head_rows"]]
        return {"logits": logits, "argmax": logits.argmax(-1)}

    def move_row(self, source: int, destination: int) -> None:
        pass


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


# --- rounds ---------------------------------------------------------------------------------------


def verify_input(
    tokens: Array, forced: int, position: int, seeds: Array, sampling: Sampling, **drafts: Any
) -> VerifyInput:
    n = len(tokens)
    none = (n, 1, CANDIDATES)
    values: dict[str, Any] = {
        "budget": np.full(n, 100),
        "draft_tokens": np.array([DRAFTS]),
        "candidate_ids": np.zeros(none, np.int32),
        "candidate_probs": np.zeros(none, np.float32),
    }
    row = np.array([sampling.temperature, sampling.top_k, sampling.top_p], np.float32)
    return VerifyInput(
        row=np.zeros(1, np.int64),
        moves=np.full((1, 2), -1),
        tokens=tokens,
        lengths=np.full(n, tokens.shape[1]),
        forced=np.full(n, forced),
        positions=np.full(n, position),
        sampling=np.tile(row, (n, 1)),
        seeds=seeds,
        **(values | drafts),
    )


def draw_rounds(sampling: Sampling) -> tuple[Array, Array]:
    """DRAWS times a prompt and one round after it.

    Returns the tokens `[DRAWS, 1 + DRAFTS + 1]`, the prompt's own first, and how many of them the
    round committed.
    """
    run = in_process(TableTarget(), TableDrafter())  # type: ignore[arg-type]
    texts, committed = [], []
    for start in range(0, DRAWS, BATCH):
        seeds = np.arange(start, start + BATCH)
        prompts = np.tile(PROMPT, (BATCH, 1))
        first = run(verify_input(prompts, len(PROMPT), 0, seeds, sampling))
        block = np.column_stack([first.next_tokens, first.drafts])
        second = run(
            verify_input(
                block,
                1,
                len(PROMPT),
                seeds,
                sampling,
                budget=np.ones(BATCH, np.int64),  # no drafts after this round
                candidate_ids=first.next_candidate_ids,
                candidate_probs=first.next_candidate_probs,
            )
        )
        text = np.column_stack([block, np.zeros(BATCH, np.int64)])
        text[np.arange(BATCH), second.accepted + 1] = second.next_tokens
        texts.append(text)
        committed.append(second.accepted + 1)
    return np.concatenate(texts), np.concatenate(committed)


def excess(before: Array, tokens: Array, sampling: Sampling) -> float:
    """`chi_square` of tokens drawn after the tokens `before`, one distribution for each."""
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (before, tokens), 1)
    seen = np.flatnonzero(counts.any(axis=1))
    target = TableTarget()
    probs = [distribution(target.logits[token], sampling) for token in seen]
    return chi_square(counts[seen], np.array(probs))


def round_excess(sampling: Sampling) -> list[float]:
    """Of the prompt's own token, then of the first, second and third that the round committed."""
    texts, committed = draw_rounds(sampling)
    texts = np.column_stack([np.full(len(texts), PROMPT[-1]), texts])
    return [
        excess(rows[:, place], rows[:, place + 1], sampling)
        for place in range(4)
        for rows in [texts[committed >= place]]
    ]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.8, top_k=8, top_p=0.9)], ids=["plain", "cut"]
)
def test_committed_tokens_follow_the_target(sampling: Sampling) -> None:
    for place, z in enumerate(round_excess(sampling)):
        assert z < CRITICAL_Z, f"token {place} does not follow the target: z = {z:.1f}"


def test_without_the_residual_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers find a rejected draft replaced by a draw from p instead of max(p - q, 0)."""

    def wrong(
        drafts: Array, logits: Array, ids: Array, probs: Array, sampling: Sampling, rng: Any
    ) -> tuple[int, int]:
        accepted, token = accept_sampled(drafts, logits, ids, probs, sampling, rng)
        if accepted < len(drafts):
            token = int(rng.choice(VOCAB, p=distribution(logits[accepted], sampling)))
        return accepted, token

    monkeypatch.setattr(rounds, "accept_sampled", wrong)
    prompt, *of_round = round_excess(Sampling(1.0))
    assert prompt < CRITICAL_Z
    for place, z in enumerate(of_round):
        assert z > CRITICAL_Z, f"token {place + 1}: z = {z:.1f}"


def test_whole_texts_follow_the_target() -> None:
    """Through the scheduler, over several rounds, requests joining and leaving, greedy ones too."""
    sampling = Sampling(1.0)
    scheduler = Scheduler(
        in_process(TableTarget(), TableDrafter()),  # type: ignore[arg-type]
        slots=16,
        max_seq_len=64,
        prefill_chunk=64,
        draft_length=DraftLength(DRAFTS + 1, DRAFTS),
        max_queue=DRAWS,
    )
    sequences = [
        scheduler.submit(Request(PROMPT, 16, replace(sampling, seed=seed))) for seed in range(1250)
    ]
    greedy = [scheduler.submit(Request(PROMPT, 16)) for _ in range(3)]
    while scheduler.busy:
        scheduler.step()
    texts = np.array([PROMPT[-1:] + tuple(s.tokens) for s in sequences])
    # all 20,000 tokens, and pairs across the borders of rounds: every token given the one before
    assert excess(texts[:, :-1].ravel(), texts[:, 1:].ravel(), sampling) < CRITICAL_Z
    argmax = TableTarget().logits.argmax(-1)
    expected = [argmax[PROMPT[-1]]]
    while len(expected) < 16:
        expected.append(argmax[expected[-1]])
    assert all(s.tokens == expected for s in greedy)


# --- one decision ---------------------------------------------------------------------------------


def propose_one(logits: Array, sampling: Sampling, rng: Any) -> tuple[int, Array, Array]:
    """One draft, its candidates and their probabilities."""
    drafts, ids, probs = propose(logits[None], sampling, rng)
    return int(drafts[0]), ids[0], probs[0]


def accept_draws(p: Array, drafter: Array, sampling: Sampling) -> tuple[Array, float]:
    """The tokens that DECISIONS rounds of one draft commit first, and the share of drafts kept."""
    counts, kept = np.zeros(VOCAB), 0
    for seed in range(DECISIONS):
        draft, ids, probs = propose_one(drafter, sampling, generator(seed, 1, stage=0))
        accepted, token = accept_sampled(
            np.array([draft]),
            np.stack([p, p]),
            ids[None],
            probs[None],
            sampling,
            generator(seed, 1, stage=1),
        )
        counts[draft if accepted else token] += 1
        kept += accepted
    return counts, kept / DECISIONS


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0], ids=["equal", "near", "far"])
def test_acceptance_rate_is_the_overlap(scale: float) -> None:
    """A draft is kept with probability sum(min(p, q)), q being the drafter's cut distribution."""
    sampling = Sampling(1.0)
    logits = table(3)
    drafter = logits + np.float32(scale) * table(4)
    counts, rate = accept_draws(logits, drafter, sampling)
    p = distribution(logits, sampling)
    q = np.zeros(VOCAB)
    _, ids, probs = propose_one(drafter, sampling, generator(0, 0, stage=0))
    np.add.at(q, ids, probs.astype(np.float64))
    overlap = np.minimum(p, q).sum()
    assert abs(rate - overlap) < 4 * (0.25 / DECISIONS) ** 0.5
    assert chi_square(counts[None], p[None]) < CRITICAL_Z


def test_drafts_follow_their_candidates() -> None:
    logits, sampling = table(5), Sampling(0.7)
    counts = np.zeros(VOCAB)
    for seed in range(DECISIONS):
        draft, ids, probs = propose_one(logits, sampling, generator(seed, 9, stage=0))
        counts[draft] += 1
    assert ids.dtype == np.int32
    assert probs.dtype == np.float32
    assert probs.sum() == pytest.approx(1.0, abs=1e-6)
    p = distribution(logits, sampling)
    assert set(ids) == set(np.argsort(-p)[:CANDIDATES])
    q = np.zeros(VOCAB)
    q[ids] = probs
    np.testing.assert_allclose(q[ids], p[ids] / p[ids].sum(), atol=1e-6)
    assert chi_square(counts[None], q[None]) < CRITICAL_Z


def test_a_vocabulary_smaller_than_the_candidates() -> None:
    logits = np.array([1.0, -2.0, 0.5, 0.0], np.float32)
    drafts = set()
    for seed in range(500):
        draft, ids, probs = propose_one(logits, Sampling(2.0), generator(seed, 0, stage=0))
        drafts.add(draft)
        assert ids.shape == probs.shape == (CANDIDATES,)
    assert drafts == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_distribution_is_zlabs(temperature: float, top_k: int, top_p: float) -> None:
    for seed in range(20):
        logits = 3 * table(100 + seed)
        ours = distribution(logits, Sampling(temperature, top_k, top_p))
        theirs = zlab._sampling_probs(torch.from_numpy(logits), temperature, top_p, top_k).numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert ours.sum() == pytest.approx(1.0)


def test_distribution_by_hand() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    np.testing.assert_allclose(distribution(logits, Sampling(1.0)), [0.5, 0.3, 0.15, 0.05], 1e-5)
    two = [0.625, 0.375, 0, 0]
    np.testing.assert_allclose(distribution(logits, Sampling(1.0, top_k=2)), two, 1e-5)
    # 0.5 alone is short of 0.6; the token that reaches the mass is kept
    np.testing.assert_allclose(distribution(logits, Sampling(1.0, top_p=0.6)), two, 1e-5)
    np.testing.assert_allclose(distribution(logits, Sampling(1.0, top_p=0.01)), [1, 0, 0, 0], 1e-5)
    # top-p counts the mass that top-k left: 0.625 and 0.375
    np.testing.assert_allclose(
        distribution(logits, Sampling(1.0, top_k=2, top_p=0.6)), [1, 0, 0, 0], 1e-5
    )
    cold = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(distribution(logits, Sampling(0.5)), cold / cold.sum(), 1e-5)


def test_extreme_logits_stay_a_distribution() -> None:
    logits = np.array([-1e30, 0.0, 1e30, -np.inf], np.float32)
    for sampling in (Sampling(1e-4), Sampling(1.0, 3, 0.5), Sampling(100.0)):
        assert distribution(logits, sampling).tolist() == [0, 0, 1, 0]


def test_random_numbers_depend_on_seed_position_and_stage_alone() -> None:
    def numbers(seed: int, position: int, stage: int) -> tuple[float, ...]:
        return tuple(generator(seed, position, stage).random(50))

    streams = {
        numbers(seed, position, stage)
        for seed in (0, 1, 2**62)
        for position in (0, 1, 2, 1000)
        for stage in (0, 1)
    }
    assert len(streams) == 24
    assert numbers(1, 2, 0) == numbers(1, 2, 0)
    # no stream is a shifted copy of another
    flat = [number for stream in streams for number in stream]
    assert len(set(flat)) == len(flat)


def test_greedy_acceptance() -> None:
    argmax = np.array([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    drafts = np.array([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, 6]])
    # the last row has two real drafts; what stands behind them is padding
    accepted = accept_greedy(drafts, argmax, np.array([3, 3, 3, 2]))
    assert accepted.tolist() == [3, 1, 0, 2]
