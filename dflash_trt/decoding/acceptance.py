"""Which drafts the target keeps. All rules leave the target's own output unchanged."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from dflash_trt.decoding.coupling import choose
from dflash_trt.decoding.messages import NO_HISTORY, VerifyInput
from dflash_trt.decoding.rules import Rules, decode
from dflash_trt.decoding.sampling import Float32, draw, tempered
from dflash_trt.decoding.tree import walk

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
    weights: Callable[[int], Float32],
    candidate_ids: Sequence[Sequence[int]],
    candidate_probs: Sequence[Sequence[float]],
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Rejection sampling: how many drafts of one sequence are kept, and the token after them.

    weights(j) `[vocab]` is in proportion to the target's distribution p after the first j drafts;
    draft j was drawn from q, candidate_probs[j] `[k]` over candidate_ids[j] `[k]`; uniforms are of
    [0, 1), one more than drafts. Draft j is kept with probability min(1, p_j / q_j); the first one
    rejected is replaced by a draw from max(p - q, 0), so that the committed tokens follow p.
    FloatingPointError when the weights are no numbers.
    """
    for j, draft in enumerate(drafts):
        p, ids, probs = weights(j), candidate_ids[j], candidate_probs[j]
        total = float(p.sum())
        if not math.isfinite(total):
            raise FloatingPointError
        if uniforms[j] * probs[ids.index(draft)] * total < p[draft]:
            continue
        of_candidates = p[ids].tolist()
        p[ids] = [max(0.0, a - q * total) for a, q in zip(of_candidates, probs, strict=True)]
        token = draw(p, uniforms[-1])
        if token is None:  # p == q up to rounding leaves nothing; then p itself is drawn from
            p[ids] = of_candidates
            token = draw(p, uniforms[-1])
        return j, token or 0
    return len(drafts), draw(weights(len(drafts)), uniforms[-1]) or 0


def accept_by_rules(
    x: VerifyInput, own: Sequence[Sequence[int]], logits: Float32
) -> list[Kept | None]:
    """Which drafts of each row are kept (1: the first), and the target's token after them.

    own `[n, D + 1]`: the target's likeliest token after the anchor and after each draft; logits
    `[n, D + 1, vocab]`. None: these are no numbers, which hurts that row alone.
    """
    kept: list[Kept | None] = [None] * len(own)
    drawing: list[_Drawing] = []
    lines = zip(x.rules.tolist(), x.rows.tolist(), x.tokens.tolist(), strict=True)
    for i, (encoded, (length, forced, start, _), tokens) in enumerate(lines):
        drafts, rules = tokens[forced:length], decode(encoded)
        parents = x.parents[i, 1:length].tolist() if x.parents.shape[1] > 1 else range(len(drafts))
        if not encoded:
            kept[i] = _walk(drafts, parents, own[i])
        elif x.uniforms.shape[1] > 1 and rules.sampling.temperature:
            kept[i] = _accept_chain(x, i, rules, drafts, logits[i])
        else:
            walked = walk(drafts, parents)
            history = history_of(x, i) if rules.need_history else []
            place = start + forced
            drawing.append(_Drawing(i, rules, place, drafts, history, walked, next(walked)))
    while drawing:  # one token each at a time
        for each, token in zip(drawing, _draw(drawing, logits), strict=True):
            if token is None:
                each.done = True
                continue
            try:
                each.path = each.walked.send(token)
            except StopIteration as end:
                kept[each.row], each.done = end.value, True
        drawing = [each for each in drawing if not each.done]
    return kept


@dataclass(slots=True)
class _Drawing:
    """A row whose tokens are drawn, and how far that is."""

    row: int
    rules: Rules
    place: int  # in the text, of the token after the anchor
    drafts: list[int]
    history: list[int]  # if its rules look at it
    walked: Generator[list[int], int, Kept]
    path: list[int]
    done: bool = False

    @property
    def node(self) -> int:
        return self.path[-1] if self.path else 0

    @property
    def position(self) -> int:
        return self.place + len(self.path)


def _draw(rows: Sequence[_Drawing], logits: Float32) -> list[int | None]:
    """The target's token where each row is."""
    samplings = [each.rules.sampling for each in rows]
    of_each = logits.reshape(-1, logits.shape[2])
    lines = of_each.take([each.row * logits.shape[1] + each.node for each in rows], 0)
    weights = tempered(lines, [sampling.temperature or 1.0 for sampling in samplings])
    for i, each in enumerate(rows):
        if not each.rules.only_temperature:
            before = each.history + [each.drafts[node - 1] for node in each.path]
            weights[i] = each.rules.weights(lines[i], each.position, before)
    positions = [each.position for each in rows]
    return choose(weights, [sampling.seed for sampling in samplings], positions)


def _accept_chain(
    x: VerifyInput, i: int, rules: Rules, drafts: Sequence[int], logits: Float32
) -> Kept | None:
    """By `accept_sampled`, of a chain that was drawn: there are random numbers in `x`."""
    place, longest = int(x.rows[i, 2] + x.rows[i, 1]), x.uniforms.shape[1] // 2
    history = history_of(x, i) if rules.need_history else []
    uniforms = [*x.uniforms[i, : len(drafts)].tolist(), float(x.uniforms[i, longest])]
    try:
        kept, token = accept_sampled(
            drafts,
            lambda j: rules.weights(logits[j], place + j, [*history, *drafts[:j]]),
            x.candidate_ids[i].tolist(),
            x.candidate_probs[i].tolist(),
            uniforms,
        )
    except FloatingPointError:
        return None
    return range(1, kept + 1), token


def _walk(drafts: Sequence[int], parents: Sequence[int], own: Sequence[int]) -> Kept:
    """Of a greedy row, whose tokens are known."""
    walked = walk(drafts, parents)
    path = next(walked)
    try:
        while True:
            path = walked.send(own[path[-1] if path else 0])
    except StopIteration as end:
        kept: Kept = end.value
        return kept


def history_of(x: VerifyInput, i: int) -> list[int]:
    """The tokens of row i up to its anchor."""
    before = [token for token in x.history[i].tolist() if token != NO_HISTORY]
    before += x.tokens[i, : x.rows[i, 1]].tolist()
    return before
