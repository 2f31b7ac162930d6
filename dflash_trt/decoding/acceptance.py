"""Which drafts the target keeps. All rules leave the target's own output unchanged."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from dflash_trt.decoding.coupling import NO_TOKEN, choose
from dflash_trt.decoding.messages import NO_HISTORY, VerifyInput
from dflash_trt.decoding.rules import Rules, decode
from dflash_trt.decoding.sampling import Float32, draw, tempered
from dflash_trt.decoding.speculation import walk

AT_ONCE = 2**15  # logits that are all drawn from sooner than those that count one after another
# of a sequence after its first j drafts: tokens' weights `[vocab]`, and their sum
Weights = Callable[[int], tuple[Float32, float]]
Kept = tuple[Sequence[int], int]  # drafts of a row (1: the first), and the token after them


def accept_greedy(drafts: Sequence[int], own: Sequence[int]) -> tuple[int, int]:
    """How many leading drafts are the target's own choice, and its token after them.

    own: the target's token after the anchor and after each draft, one more than drafts.
    """
    kept = 0
    while kept < len(drafts) and drafts[kept] == own[kept]:
        kept += 1
    return kept, own[kept]


def accept_sampled(
    drafts: Sequence[int],
    weights: Weights,
    candidate_ids: Sequence[Sequence[int]],
    candidate_probs: Sequence[Sequence[float]],
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Rejection sampling: how many drafts of one sequence are kept, and the token after them.

    weights(j) is in proportion to the target's distribution p after the first j drafts; draft j was
    drawn from q, candidate_probs[j] `[k]` over candidate_ids[j] `[k]`; uniforms are of [0, 1), one
    more than drafts. Draft j is kept with probability min(1, p_j / q_j); the first one rejected is
    replaced by a draw from max(p - q, 0), so that the committed tokens follow p.
    FloatingPointError when the weights are no numbers.
    """
    for j, draft in enumerate(drafts):
        (p, total), ids, probs = weights(j), candidate_ids[j], candidate_probs[j]
        if not math.isfinite(total):
            raise FloatingPointError
        q = probs[ids.index(draft)]
        if math.isnan(q):  # the drafter is broken: its draft is none
            return j, draw(p, uniforms[-1]) or 0
        if uniforms[j] * q * total >= p[draft]:
            return j, _draw_residual(p, total, ids, probs, uniforms[-1])
    p, _ = weights(len(drafts))
    return len(drafts), draw(p, uniforms[-1]) or 0


def _draw_residual(
    p: Float32, total: float, ids: Sequence[int], probs: Sequence[float], uniform: float
) -> int:
    """From max(p - q, 0); p `[vocab]` has this total and is written to."""
    of_candidates = p[ids].tolist()
    lines = zip(of_candidates, probs, strict=True)
    left = [*accumulate(max(0.0, a - q * total) for a, q in lines)]
    others = max(total - sum(of_candidates), 0.0)  # what q has nothing of
    at = uniform * (left[-1] + others)
    if at < left[-1]:
        return ids[bisect_right(left, at)]
    p[ids] = 0.0
    token = draw(p, (at - left[-1]) / others) if others else None
    if token is None:  # p == q up to rounding leaves nothing; then p itself is drawn from
        p[ids] = of_candidates
        token = draw(p, uniform)
    return token or 0


def accept_by_rules(
    x: VerifyInput, own: Sequence[Sequence[int]], logits: Float32
) -> list[Kept | None]:
    """Which drafts of each row are kept (1: the first), and the target's token after them.

    own `[n, D + 1]`: the target's likeliest token after the anchor and after each draft, NO_TOKEN
    where there are no numbers; logits `[n, D + 1, vocab]`. None: a row needed one of those.
    """
    kept: list[Kept | None] = [None] * len(own)
    rows: list[_Row] = []
    drawn: list[_Row] = []  # chains that were drawn: there are random numbers in `x`
    known: dict[tuple[int, int], int] = {}  # the target's token by row and node
    lines = zip(x.rules.tolist(), x.rows.tolist(), x.tokens.tolist(), strict=True)
    for i, (encoded, (length, forced, start, _), tokens) in enumerate(lines):
        rules, drafts = decode(encoded), tokens[forced:length]
        history = history_of(x, i) if rules.need_history else []
        row = _Row(i, rules, start + forced, drafts, parents_of(x, i), history)
        if x.uniforms.shape[1] > 1 and rules.sampling.temperature:
            drawn.append(row)
            continue
        rows.append(row)
        if not encoded:
            known.update(((i, node), token) for node, token in enumerate(own[i]))
    for row in drawn:
        kept[row.i] = _accept_chain(x, row, own[row.i], logits[row.i])
    few = logits.size <= AT_ONCE
    drawing = [row for row in rows if (row.i, 0) not in known]
    places = [(row, path) for row in drawing for path in (row.paths() if few else ([],))]
    while rows:
        for (row, path), token in zip(places, _draw(places, logits), strict=True):
            node = _node(path)
            known[row.i, node] = NO_TOKEN if own[row.i][node] == NO_TOKEN else token
        places = []
        for row in rows:
            path, found = walk(row.drafts, row.parents, partial(_known, known, row.i))
            if found is None:
                places.append((row, path))
            elif found != NO_TOKEN:
                kept[row.i] = path, found
        rows = [row for row, _ in places]
    return kept


@dataclass(slots=True)
class _Row:
    """What is asked of one and proposed for it."""

    i: int
    rules: Rules
    place: int  # in the text, of the token after the anchor
    drafts: Sequence[int]
    parents: Sequence[int]
    history: list[int]  # if its rules look at it

    def paths(self) -> list[list[int]]:
        """To all nodes; of rules that take long to the anchor alone."""
        found: list[list[int]] = [[]]
        if self.rules.only_temperature:
            for node, parent in enumerate(self.parents, 1):
                found.append([*found[parent], node])
        return found


def _node(path: Sequence[int]) -> int:
    return path[-1] if path else 0


def _known(tokens: Mapping[tuple[int, int], int], i: int, path: Sequence[int]) -> int | None:
    return tokens.get((i, _node(path)))


def _draw(places: Sequence[tuple[_Row, list[int]]], logits: Float32) -> list[int]:
    """The target's token behind each path."""
    if not places:
        return []
    of_all = logits.reshape(-1, logits.shape[2])
    lines = of_all.take([row.i * logits.shape[1] + _node(path) for row, path in places], 0)
    samplings = [row.rules.sampling for row, _ in places]
    positions = [row.place + len(path) for row, path in places]
    if all(row.rules.only_temperature for row, _ in places):
        weights = tempered(lines, [sampling.temperature for sampling in samplings])
    else:
        weights = lines
        for j, (row, path) in enumerate(places):
            before = row.history + [row.drafts[node - 1] for node in path]
            weights[j] = row.rules.weights(lines[j], positions[j], before)
    return choose(weights, [sampling.seed for sampling in samplings], positions)


def _accept_chain(x: VerifyInput, row: _Row, own: Sequence[int], logits: Float32) -> Kept | None:
    """By `accept_sampled`."""
    drafts, uniforms = row.drafts, x.uniforms[row.i].tolist()
    uniforms = [*uniforms[: len(drafts)], uniforms[len(uniforms) // 2]]
    ids, probs = x.candidate_ids[row.i].tolist(), x.candidate_probs[row.i].tolist()
    weights = partial(_weights_after, row, own, logits)
    try:
        kept, token = accept_sampled(drafts, weights, ids, probs, uniforms)
    except FloatingPointError:
        return None
    return range(1, kept + 1), token


def _weights_after(row: _Row, own: Sequence[int], logits: Float32, j: int) -> tuple[Float32, float]:
    """Most chains end early, so that these are worked out one after the other."""
    line, rules = logits[j], row.rules
    if rules.only_temperature:
        weights: Float32 = line - line[own[j]]
        weights /= np.float32(rules.sampling.temperature)
        np.exp(weights, weights)
    else:
        weights = rules.weights(line, row.place + j, [*row.history, *row.drafts[:j]])
    return weights, float(np.add.reduce(weights))


def history_of(x: VerifyInput, i: int) -> list[int]:
    """The tokens of row i up to its anchor."""
    before = [token for token in x.history[i].tolist() if token != NO_HISTORY]
    before += x.tokens[i, : x.rows[i, 1]].tolist()
    return before


def parents_of(x: VerifyInput, i: int) -> Sequence[int]:
    """Of row i's drafts, each one's parent: 0 is the anchor, 1 the first draft."""
    length, forced, _, _ = x.rows[i].tolist()
    if x.parents.shape[1] == 1:
        return range(length - forced)
    parents: list[int] = x.parents[i, 1:length].tolist()
    return parents
