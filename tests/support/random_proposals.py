"""Proposals and policies that no drafter made: right in places, at random, at any time."""

from collections.abc import Mapping, Sequence

import numpy as np

from dflash_trt.decoding import Proposer, SequenceState
from dflash_trt.engines.info import MAX_BUFFERED, EngineInfo
from dflash_trt.speculation import (
    Choice,
    Decision,
    Features,
    NextStep,
    Policy,
    Proposal,
    SequenceView,
)

Drafts = tuple[Sequence[Sequence[int]], np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


class MadeUp:
    """Costs in plain steps, of each further token and of the drafter, by the number of rows."""

    def __init__(self, token: Sequence[float], drafter: Sequence[float]) -> None:
        self._token, self._drafter = token, drafter

    def verify(self, n: int, width: int, context: int) -> float:
        return 1 + (width - 1) * self._token[n % len(self._token)]

    def draft(self, n: int, context: int) -> float:
        return self._drafter[n % len(self._drafter)]

    def sampling(self, n: int) -> float:
        return 0.0


COSTS = {
    "cheap": MadeUp((0.005,), (0.01,)),
    "dear": MadeUp((0.2,), (3.0,)),
    "by turns": MadeUp((0.01, 0.4), (2.0, 0.05)),
}


class AtRandom(Policy):
    """A policy that chooses at random; now and then the drafter rests until it has to run."""

    def __init__(self, draft_tokens: int, seed: int, dropping: float = 0.0) -> None:
        """dropping: how often features are, of all sequences."""
        super().__init__(draft_tokens)
        self._dropping = dropping
        self._dice = np.random.default_rng(seed)
        self._resting = 0
        self.fed = 0  # rounds in which the drafter had to run

    def decide(self, step: NextStep) -> Decision:
        decision = super().decide(step)
        if self._resting and decision.features is Features.DRAFT and not step.is_prompt:
            self._resting = 0
            self.fed += 1
        return decision

    def choose(self, step: NextStep) -> Choice:
        if step.is_prompt:
            return Choice([None], self.draft_tokens if self._dice.random() < 0.5 else 0)
        width = int(self._dice.integers(16))
        taken = [
            row.proposals[self._dice.integers(len(row.proposals))].cut(width)
            if row.proposals and width and self._dice.random() < 0.9
            else None
            for row in step.sequences
        ]
        if not self._resting and self._dice.random() < 0.2:
            self._resting = int(self._dice.choice([1, 3, 9, 400], p=[0.2, 0.4, 0.2, 0.2]))
        self._resting = max(self._resting - 1, 0)
        asked = 1 + int(self._dice.integers(self.draft_tokens))
        return Choice(taken, 0 if self._resting else asked)

    def keeps_features(self, budget: int) -> bool:
        return bool(self._dice.random() >= self._dropping)


class Guesses(Proposer):
    """A proposer of chains that are partly right; it records the drafter's candidates."""

    def __init__(
        self,
        texts: Mapping[int, list[int]],
        target: EngineInfo,
        seed: int,
        tempting: Mapping[int, list[int]] | None = None,
    ) -> None:
        """texts: what each request will say, by its `id`; tempting: what it would, were it free."""
        super().__init__(target.most_verified - 1, lookup=True)
        self._answers, self._tempting = texts, tempting or {}
        self._dice = np.random.default_rng(seed)
        self.said: dict[tuple[int, int], Drafts] = {}  # by request and position
        self.lost = 0  # sequences of rounds, of which features were dropped

    def views(self, sequences: Sequence[SequenceState]) -> list[SequenceView]:
        views = []
        for sequence, view in zip(sequences, super().views(sequences), strict=True):
            assert sequence.buffered <= MAX_BUFFERED
            assert not (sequence.out_of_sync and sequence.candidates)
            self.lost += sequence.out_of_sync
            if sequence.candidates is not None:
                ids, probs = sequence.candidates.ids.tolist(), sequence.candidates.probs.copy()
                self.said[id(sequence.request), sequence.position] = ids, probs
            text = self._answers[id(sequence.request)][len(sequence.tokens) :]
            free = self._tempting.get(id(sequence.request), [])[len(sequence.tokens) :]
            proposals = [x for x in (*view.proposals, self._guess(text, free)) if x.tokens]
            views.append(view._replace(proposals=proposals))
        return views

    def _guess(self, text: list[int], free: list[int]) -> Proposal:
        """Return a partly right proposal, shorter than `text` because the target adds a token."""
        tokens, right = list[int](), True
        for place in range(min(int(self._dice.integers(1, 16)), len(text) - 1)):
            token = int(self._dice.integers(300))
            if free and self._dice.random() < 0.5:
                token = free[place]
            if right and self._dice.random() < 0.8:
                token = text[place]
            right &= token == text[place]
            tokens.append(token)
        return Proposal("drafter", tokens, [0.5] * len(tokens))
