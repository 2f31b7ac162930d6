"""Temperature above 0: the committed tokens of rejection sampling follow the target's distribution.

The models are those of `tables`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dflash.model as zlab
import numpy as np
import pytest
import torch
from tables import (
    BATCH,
    CRITICAL_Z,
    CUT,
    DRAFTERS,
    DRAFTS,
    DRAWS,
    PENALISED,
    PROMPT,
    VOCAB,
    Array,
    TableDrafter,
    TableTarget,
    chi_square,
    distribution,
    excess,
    excess_by_place,
    penalised_excess,
    table,
    verify_input,
)

from dflash_trt.decoding import acceptance
from dflash_trt.decoding.acceptance import accept_greedy, accept_sampled
from dflash_trt.decoding.rounds import in_process
from dflash_trt.decoding.sampling import Sampling, draw, propose, weights
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.graphs.drafter import CANDIDATES

DECISIONS = 5_000


# --- rounds ---------------------------------------------------------------------------------------


def draw_rounds(sampling: Sampling, drafter: str = "plain") -> tuple[Array, Array]:
    """DRAWS times a prompt and one round after it.

    Returns the tokens `[DRAWS, 1 + DRAFTS + 1]`, the prompt's own first, and how many of them the
    round committed.
    """
    run = in_process(TableTarget(), DRAFTERS[drafter]())  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    texts, committed = [], []
    for _ in range(0, DRAWS, BATCH):
        prompts = np.tile(PROMPT, (BATCH, 1))
        numbers = rng.random((2, BATCH, 2 * DRAFTS + 1))
        first = run(verify_input(prompts, len(PROMPT), 0, numbers[0], sampling))
        block = np.column_stack([first.results[:, 1], first.drafts])
        second = run(
            verify_input(
                block,
                1,
                len(PROMPT),
                numbers[1],
                sampling,
                # no drafts after this round
                rows=np.tile([DRAFTS + 1, 1, len(PROMPT), 1], (BATCH, 1)),
                history=prompts,
                candidate_ids=first.next_candidate_ids,
                candidate_probs=first.next_candidate_probs,
            )
        )
        text = np.column_stack([block, np.zeros(BATCH, np.int64)])
        accepted, token = second.results[:, :2].T
        text[np.arange(BATCH), accepted + 1] = token
        texts.append(text)
        committed.append(accepted + 1)
    return np.concatenate(texts), np.concatenate(committed)


def round_excess(sampling: Sampling, drafter: str) -> list[float]:
    texts, committed = draw_rounds(sampling, drafter)
    return excess_by_place(texts, committed, sampling)


@pytest.mark.parametrize(
    ("sampling", "drafter"),
    [
        pytest.param(Sampling(1.0), "plain", id="plain"),
        pytest.param(CUT, "plain", id="cut", marks=pytest.mark.models),
        pytest.param(CUT, "pairs", id="cut-pairs", marks=pytest.mark.models),
    ],
)
def test_committed_tokens_follow_the_target(sampling: Sampling, drafter: str) -> None:
    for place, z in enumerate(round_excess(sampling, drafter)):
        assert z < CRITICAL_Z, f"token {place} does not follow the target: z = {z:.1f}"


@pytest.mark.models
def test_penalised_tokens_follow_the_target() -> None:
    """Penalties depend on the drafts before, too: the first two tokens of a round, given those."""
    texts, committed = draw_rounds(PENALISED)
    for place in (0, 1):
        z = penalised_excess(texts, committed, place)
        assert z < CRITICAL_Z, f"token {place + 1} does not follow the target: z = {z:.1f}"


@pytest.mark.parametrize("drafter", ["plain", pytest.param("pairs", marks=pytest.mark.models)])
def test_without_the_residual_the_test_fails(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """The same numbers find a rejected draft replaced by a draw from p instead of max(p - q, 0)."""

    rng = np.random.default_rng(1)

    def wrong(drafts: Any, weights: Any, *others: Any) -> tuple[int, int]:
        before = [weights(j)[0].astype(np.float64) for j in range(len(drafts))]
        accepted, token = accept_sampled(drafts, weights, *others)
        if accepted < len(drafts):
            p = before[accepted]  # as it was: a rejected draft's weights are written to
            token = int(rng.choice(VOCAB, p=p / p.sum()))
        return accepted, token

    monkeypatch.setattr(acceptance, "accept_sampled", wrong)
    prompt, *of_round = round_excess(Sampling(1.0), drafter)
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
        policy=Fixed(DRAFTS),
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


def propose_one(
    logits: Array, sampling: Sampling, uniform: float
) -> tuple[int, list[int], list[float]]:
    """One draft, its candidates and their probabilities."""
    ids = np.argsort(-logits, kind="stable")[:CANDIDATES]
    drawn, probs = propose(logits[ids][None], [sampling], np.array([uniform]))
    return int(ids[drawn[0]]), ids.tolist(), probs[0].tolist()


def with_total(weights: Array) -> tuple[Array, float]:
    return weights, float(weights.sum())


def accept_draws(p: Array, drafter: Array, sampling: Sampling) -> tuple[Array, float]:
    """The tokens that DECISIONS rounds of one draft commit first, and the share of drafts kept."""
    counts, kept = np.zeros(VOCAB), 0
    for numbers in np.random.default_rng(2).random((DECISIONS, 3)).tolist():
        draft, ids, probs = propose_one(drafter, sampling, numbers[0])
        accepted, token = accept_sampled(
            [draft], lambda j: with_total(weights(p, sampling)), [ids], [probs], numbers[1:]
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
    _, ids, probs = propose_one(drafter, sampling, 0.5)
    q[ids] = probs
    overlap = np.minimum(p, q).sum()
    assert abs(rate - overlap) < 4 * (0.25 / DECISIONS) ** 0.5
    assert chi_square(counts[None], p[None]) < CRITICAL_Z


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7), Sampling(1.2, 5), Sampling(1.2, 0, 0.7), Sampling(1.0, min_p=0.2)],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_drafts_follow_their_candidates(sampling: Sampling) -> None:
    """The drafter's distribution, cut to its candidates and then as the target's is cut."""
    logits = table(5)
    counts = np.zeros(VOCAB)
    for uniform in np.random.default_rng(3).random(DECISIONS).tolist():
        draft, ids, probs = propose_one(logits, sampling, uniform)
        counts[draft] += 1
    q = np.zeros(VOCAB)
    q[ids] = probs
    cut = np.full(VOCAB, -np.inf, np.float32)
    cut[ids] = logits[ids]
    np.testing.assert_allclose(q, distribution(cut, sampling), atol=1e-6)
    assert chi_square(counts[None], q[None]) < CRITICAL_Z


def test_a_greedy_draft_is_the_best_candidate() -> None:
    drawn, probs = propose(np.array([[2, 1]], np.float32), [Sampling()], np.array([0.99]))
    assert (drawn.tolist(), probs.tolist()) == ([0], [[1, 0]])


def test_a_drafter_without_numbers_changes_no_distribution() -> None:
    """What it proposes is rejected, and the target's token drawn as if there were no draft."""
    p, counts = table(3), np.zeros(VOCAB)
    ids = [*range(CANDIDATES)]
    for numbers in np.random.default_rng(4).random((DECISIONS, 2)).tolist():
        logits = np.full((1, CANDIDATES), np.nan, np.float32)
        drawn, probs = propose(logits, [Sampling(1.0)], np.array(numbers[:1]))
        accepted, token = accept_sampled(
            [ids[drawn[0]]],
            lambda j: with_total(weights(p, Sampling(1.0))),
            [ids],
            probs.tolist(),
            numbers,
        )
        assert not accepted
        counts[token] += 1
    assert chi_square(counts[None], distribution(p, Sampling(1.0))[None]) < CRITICAL_Z


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


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_weight_is_never_drawn(uniform: float) -> None:
    assert draw(np.array([0, 0, 1e-30, 3, 0, 0], np.float32), uniform) in (2, 3)
    assert draw(np.array([0, 1, 0], np.float32), uniform) == 1
    assert draw(np.zeros(3, np.float32), uniform) is None


@pytest.mark.parametrize("drafts", [[], [1]])
def test_weights_that_are_no_numbers_are_told(drafts: list[int]) -> None:
    """At the place of a draft and, with none left, of the target's own token."""
    with pytest.raises(FloatingPointError):
        accept_sampled(
            drafts,
            lambda j: with_total(np.full(VOCAB, np.nan, np.float32)),
            [[1]] * len(drafts),
            [[1.0]] * len(drafts),
            [0.5] * (len(drafts) + 1),
        )


def test_greedy_acceptance() -> None:
    own = [4, 5, 6, 7]
    assert accept_greedy([4, 5, 6], own) == (3, 7)
    assert accept_greedy([4, 9, 6], own) == (1, 5)
    assert accept_greedy([9, 5, 6], own) == (0, 4)
    # a row with fewer drafts than its neighbours: what stands behind them is padding
    assert accept_greedy([4, 5], own) == (2, 6)
    assert accept_greedy([], own) == (0, 4)
