"""Temperature above 0: the committed tokens follow the target's distribution.

The models are tables here, so that the true distributions are known: the target's logits depend on
the last token, the drafter's on the anchor and the place in the block. Everything between the
tables and the text is the real thing: `verify`, `draft`, acceptance, random numbers, scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dflash.model as zlab
import numpy as np
import pytest
import torch

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import acceptance
from dflash_trt.decoding.acceptance import accept_greedy, accept_sampled
from dflash_trt.decoding.coupling import NO_TOKEN, choose, noise
from dflash_trt.decoding.messages import NO_HISTORY, VerifyInput, chains
from dflash_trt.decoding.policy import Fixed
from dflash_trt.decoding.proposals import Proposer, strategy
from dflash_trt.decoding.rounds import in_process
from dflash_trt.decoding.rules import Rules, encode
from dflash_trt.decoding.sampling import Sampling, draw, propose, tempered, weights
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request, Sequence
from dflash_trt.engines.onnxruntime import Step
from dflash_trt.graphs.drafter import CANDIDATES

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


def distribution(logits: Array, sampling: Sampling) -> Array:
    kept = weights(logits, sampling).astype(np.float64)
    return kept / kept.sum()


class TableModel:
    """An engine without a cache: `look_up(inputs)` gives the logits of all positions."""

    visible_step = 32

    def __init__(self, best: int) -> None:
        self.info = SimpleNamespace(
            cache_len=1 << 20,
            vocab_size=VOCAB,
            block_size=DRAFTS + 1,
            mask_token_id=0,
            best=best,
            sample_from_anchor=False,
            most_verified=7,
            deepest=DRAFTS,
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

    def move_row(self, source: int, destination: int) -> None:
        pass

    def keep_tokens(self, row: int, start: int, kept: Seq[int]) -> None:
        pass


class TableTarget(TableModel):
    """Logits of the next token by the last one."""

    def __init__(self) -> None:
        super().__init__(best=1)
        self.logits = table(0) + table(1, VOCAB)

    def look_up(self, inputs: Mapping[str, Array]) -> Array:
        return self.logits[inputs["tokens"]]


class TableDrafter(TableModel):
    """Logits by the anchor and the place in the block; drafts are kept about half the time."""

    def __init__(self) -> None:
        super().__init__(best=CANDIDATES)
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


# --- rounds ---------------------------------------------------------------------------------------


def verify_input(
    tokens: Array, forced: int, position: int, uniforms: Array, sampling: Sampling, **more: Any
) -> VerifyInput:
    n, width = tokens.shape
    values: dict[str, Any] = {
        "rows": np.tile([width, forced, position, 100], (n, 1)),
        "candidate_ids": np.zeros((n, 1, 1), np.int64),
        "candidate_probs": np.zeros((n, 1, 1), np.float32),
        "history": np.full((n, 1), NO_HISTORY),
    }
    return VerifyInput(
        batch=np.array([0, DRAFTS, 0]),
        tokens=tokens,
        parents=chains(n),
        rules=np.full(n, encode(Rules(sampling, len(PROMPT), ())), object),
        uniforms=uniforms,
        **(values | more),
    )


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


def excess(before: Array, tokens: Array, sampling: Sampling) -> float:
    """`chi_square` of tokens drawn after the tokens `before`, one distribution for each."""
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (before, tokens), 1)
    seen = np.flatnonzero(counts.any(axis=1))
    target = TableTarget()
    probs = [distribution(target.logits[token], sampling) for token in seen]
    return chi_square(counts[seen], np.array(probs))


def round_excess(sampling: Sampling, drafter: str) -> list[float]:
    """Of the prompt's own token, then of the first, second and third that the round committed."""
    texts, committed = draw_rounds(sampling, drafter)
    texts = np.column_stack([np.full(len(texts), PROMPT[-1]), texts])
    return [
        excess(rows[:, place], rows[:, place + 1], sampling)
        for place in range(4)
        for rows in [texts[committed >= place]]
    ]


CUT = Sampling(0.8, top_k=8, top_p=0.9, min_p=0.05)


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


PENALISED = Sampling(1.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.4)


def penalised_excess(texts: Array, committed: Array, place: int) -> float:
    """`excess` of a token of PENALISED rounds, given all before it."""
    rules, target = Rules(PENALISED, len(PROMPT), ()), TableTarget()
    counts: dict[tuple[int, ...], Array] = {}
    for row in texts[committed > place]:
        before = tuple(row[: place + 1].tolist())
        counts.setdefault(before, np.zeros(VOCAB))[row[place + 1]] += 1
    probs = []
    for before in counts:
        history = [*PROMPT, *before]
        kept = rules.weights(target.logits[before[-1]], len(history), history)
        probs.append(kept / kept.sum(dtype=np.float64))
    return chi_square(np.array(list(counts.values())), np.array(probs))


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
        accepted, token = accept_sampled(drafts, weights, *others)
        if accepted < len(drafts):
            p = weights(accepted).astype(np.float64)
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


# --- rounds that draw by seed and position --------------------------------------------------------

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
    """`round_excess`, and that proposals were of this kind and often kept."""
    texts, committed, seen = coupled_rounds(sampling, kind, draws)
    assert seen["tree" if kind == "tree" else "chain"] > 0.8 * draws
    assert seen["kept"] > 0.2 * draws
    if sampling is PENALISED:
        return [penalised_excess(texts, committed, place) for place in (0, 1)]
    texts = np.column_stack([np.full(len(texts), PROMPT[-1]), texts])
    return [
        excess(rows[:, place], rows[:, place + 1], sampling)
        for place in range(4)
        for rows in [texts[committed >= place]]
    ]


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


def test_coupled_texts_follow_the_target() -> None:
    """As `test_whole_texts_follow_the_target`; and texts do not depend on who proposes."""
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


# --- one decision ---------------------------------------------------------------------------------


def propose_one(
    logits: Array, sampling: Sampling, uniform: float
) -> tuple[int, list[int], list[float]]:
    """One draft, its candidates and their probabilities."""
    ids = np.argsort(-logits, kind="stable")[:CANDIDATES].tolist()
    draft, probs = propose(ids, logits[ids].tolist(), sampling, uniform)
    return draft, ids, probs


def accept_draws(p: Array, drafter: Array, sampling: Sampling) -> tuple[Array, float]:
    """The tokens that DECISIONS rounds of one draft commit first, and the share of drafts kept."""
    counts, kept = np.zeros(VOCAB), 0
    for numbers in np.random.default_rng(2).random((DECISIONS, 3)).tolist():
        draft, ids, probs = propose_one(drafter, sampling, numbers[0])
        accepted, token = accept_sampled(
            [draft], lambda j: weights(p, sampling), [ids], [probs], numbers[1:]
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
    assert propose([7, 3], [2.0, 1.0], Sampling(), 0.99) == (7, [1.0, 0.0])


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
            lambda j: np.full(VOCAB, np.nan, np.float32),
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
