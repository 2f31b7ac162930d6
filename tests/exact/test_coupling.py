"""Tokens that are drawn by seed and position follow the target's distribution, too.

The models are those of `tables`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tables import (
    BATCH,
    CRITICAL_Z,
    CUT,
    DRAFTS,
    DRAWS,
    PENALISED,
    PROMPT,
    VOCAB,
    Array,
    TableDrafter,
    TableTarget,
    chi_square,
    excess,
    excess_by_place,
    penalised_excess,
    verify_input,
)

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import acceptance
from dflash_trt.decoding.coupling import NO_TOKEN, choose, noise
from dflash_trt.decoding.rounds import in_process
from dflash_trt.decoding.rules import encode
from dflash_trt.decoding.sampling import Sampling, tempered
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request, Sequence
from dflash_trt.decoding.speculation import Adaptive, Proposer, strategy
from dflash_trt.graphs.drafter import CANDIDATES

FEW = 4_000  # draws, enough for what is wrong to show


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


def coupled_rounds(
    sampling: Sampling, kind: str, draws: int
) -> tuple[Array, Array, dict[str, int]]:
    """`draws` times a prompt and one round after it, each with its own seed; see `draw_rounds`.

    kind: chain, tree or lookup. Also how many proposals were chains and trees, and drafts kept.
    """
    run = in_process(TableTarget(), TableDrafter())  # type: ignore[arg-type]
    speculation = Speculation(tree=kind == "tree", correction=False)
    proposer = Proposer(speculation, SlowSteps(), TableTarget().info)  # type: ignore[arg-type]
    prompt = repeating() if kind == "lookup" else PROMPT
    texts, committed, seen = [], [], dict.fromkeys(("chain", "tree", "kept"), 0)
    for start in range(0, draws, BATCH):
        requests = [
            Request(prompt, 100, replace(sampling, seed=seed))
            for seed in range(start, start + BATCH)
        ]
        rules = np.array([encode(each.rules) for each in requests], object)
        common: dict[str, Any] = {"batch": np.array([0, DRAFTS, CANDIDATES]), "rules": rules}
        prompts, alone = np.tile(prompt, (BATCH, 1)), np.zeros((BATCH, 1))
        first = run(verify_input(prompts, len(prompt), 0, alone, sampling)._replace(**common))
        proposals = []
        for request, token, *candidates in zip(
            requests,
            first.results[:, 1].tolist(),
            first.next_candidate_ids,
            first.next_candidate_probs,
            strict=True,
        ):
            sequence = Sequence(request, [token], position=len(prompt), candidates=(*candidates,))
            offers = {each.source: each for each in proposer.rows([sequence], 0)[0].offers}
            proposals.append(offers["lookup" if kind == "lookup" else "drafter"])
        width = 1 + max(len(each.tokens) for each in proposals)
        block = padded([[*each.tokens] for each in proposals], width - 1)
        block = np.column_stack([first.results[:, 1], block])
        x = verify_input(block, 1, len(prompt), alone, sampling)._replace(**common, history=prompts)
        x.rows[:, 0] = [1 + len(each.tokens) for each in proposals]
        if not all(each.is_chain for each in proposals):
            parents = padded([[0, *each.parents] for each in proposals], width)
            x = x._replace(parents=parents)
        second = run(x)
        for tokens, (kept, token, _, *path), proposal in zip(
            block.tolist(), second.results.tolist(), proposals, strict=True
        ):
            nodes = path[:kept] if path else range(1, kept + 1)
            text = [tokens[0], *(tokens[node] for node in nodes), token]
            texts.append((text + [0] * DRAFTS)[: DRAFTS + 2])
            committed.append(kept + 1)
            seen["chain" if proposal.is_chain else "tree"] += 1
            seen["kept"] += kept
    return np.array(texts), np.array(committed), seen


def padded(lines: Seq[Seq[int]], width: int) -> Array:
    return np.array([[*line, *[0] * (width - len(line))] for line in lines])


def coupled_excess(sampling: Sampling, kind: str, draws: int = DRAWS) -> list[float]:
    """`excess_by_place`, and that proposals were of this kind and often kept."""
    texts, committed, seen = coupled_rounds(sampling, kind, draws)
    assert seen["tree" if kind == "tree" else "chain"] > 0.8 * draws
    assert seen["kept"] > 0.2 * draws
    if sampling is PENALISED:
        return [penalised_excess(texts, committed, place) for place in (0, 1)]
    return excess_by_place(texts, committed, sampling)


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        pytest.param(Sampling(1.0), "chain", id="chain"),
        pytest.param(CUT, "lookup", id="cut-lookup", marks=pytest.mark.models),
        pytest.param(PENALISED, "tree", id="penalised-tree", marks=pytest.mark.models),
    ],
)
def test_coupled_tokens_follow_the_target(sampling: Sampling, kind: str) -> None:
    for place, z in enumerate(coupled_excess(sampling, kind)):
        assert z < CRITICAL_Z, f"token {place} does not follow the target: z = {z:.1f}"


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_accepting_the_second_best_fails(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The same numbers find drafts kept that the target would only draw second."""

    def noted(weights: Array, seeds: Seq[int], positions: Seq[int]) -> list[int]:
        tokens = choose(weights, seeds, positions)
        others = weights.copy()
        for line, token in zip(others, tokens, strict=True):
            line[token] = 0
            line /= line.max()
        # both in one number: `wrong` is told no more than the token
        return [
            a + VOCAB * b for a, b in zip(tokens, choose(others, seeds, positions), strict=True)
        ]

    def wrong(tokens: Any, parents: Any, own: Any) -> tuple[list[int], int | None]:
        children = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True), 1)}
        path: list[int] = []
        while True:
            both, node = own(path), path[-1] if path else 0
            if both is None:
                return path, None
            child = children.get((node, both % VOCAB)) or children.get((node, both // VOCAB))
            if child is None:
                return path, both % VOCAB
            path.append(child)

    monkeypatch.setattr(acceptance, "choose", noted)
    monkeypatch.setattr(acceptance, "walk", wrong)
    prompt, *of_round = coupled_excess(Sampling(1.0), kind, FEW)
    assert prompt < CRITICAL_Z
    for place, z in enumerate(of_round[:2]):
        assert z > CRITICAL_Z, f"token {place + 1}: z = {z:.1f}"


def test_noise_used_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers find the noise of one position used at another."""
    monkeypatch.setattr(acceptance, "choose", lambda w, seeds, at: choose(w, seeds, [0] * len(at)))
    prompt, *of_round = coupled_excess(Sampling(1.0), "lookup", FEW)
    assert prompt < CRITICAL_Z
    for place, z in enumerate(of_round):
        assert z > CRITICAL_Z, f"token {place + 1}: z = {z:.1f}"


def test_rows_are_drawn_as_if_alone() -> None:
    """A text must not depend on what else is running; a row without numbers hurts no other."""
    rng = np.random.default_rng(0)
    for vocab in (2, 31, 512, 5000):
        logits = rng.normal(0, 3, (40, vocab)).astype(np.float32)
        temperatures = rng.uniform(0.2, 3, 40).tolist()
        w = tempered(logits, temperatures)
        w[7] = np.nan
        drawn = choose(w, range(40), range(100, 140))
        for i, token in enumerate(drawn):
            alone = tempered(logits[i][None], [temperatures[i]])
            assert (choose(alone, [i], [100 + i]) == [token]) == (i != 7)
        assert drawn[7] == NO_TOKEN


@pytest.mark.parametrize("by", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (0, 1, -1), (2, 7, 0)])
@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**62])
def test_noise_is_independent(by: tuple[int, int, int], seed: int) -> None:
    """Of neighbours: seeds, positions, tokens. 40,000 pairs, all values alike likely."""
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
    seeds = np.repeat(np.arange(2000), 10).tolist()
    drawn = np.array([choose(w[None], [seed], [i % 10])[0] for i, seed in enumerate(seeds)])
    groups = np.where(np.arange(len(w)) < 4, np.arange(len(w)), 4 + np.arange(len(w)) % 16)
    counts, probs = np.bincount(groups[drawn]), np.bincount(groups, w)
    assert chi_square(counts[None], probs[None] / probs.sum()) < CRITICAL_Z


def test_coupled_texts_follow_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_whole_texts_follow_the_target`; and texts do not depend on who proposes."""
    monkeypatch.setattr(Adaptive, "timed", lambda *_: None)  # by `SlowSteps` alone
    requests = [Request(PROMPT, 16, Sampling(1.0, seed=seed)) for seed in range(1250)]
    texts = []
    alone = Speculation(lookup=False, correction=False, tree=False)
    for speculation, few in ((Speculation(), None), (alone, 100)):
        policy, proposer = strategy(speculation, TableTarget().info, SlowSteps())  # type: ignore[arg-type]
        scheduler = Scheduler(
            in_process(TableTarget(), TableDrafter()),  # type: ignore[arg-type]
            slots=16,
            max_seq_len=64,
            prefill_chunk=64,
            policy=policy,
            proposer=proposer,
        )
        sequences = [scheduler.submit(request) for request in requests[:few]]
        while scheduler.busy:
            scheduler.step()
        assert sum(s.accepted for s in sequences) > len(sequences)
        texts.append([PROMPT[-1:] + tuple(s.tokens) for s in sequences])
    assert texts[0][:100] == texts[1]
    tokens = np.array(texts[0])
    assert excess(tokens[:, :-1].ravel(), tokens[:, 1:].ravel(), Sampling(1.0)) < CRITICAL_Z
