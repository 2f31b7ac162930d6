"""What the policy does over many rounds, without engines: by costs and chances made up here."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
import pytest
from offers import MOST, SECOND, Costs, chain, linear, looked_up

from dflash_trt.decoding.speculation.evidence import LONGEST_REST
from dflash_trt.decoding.speculation.offers import Row
from dflash_trt.decoding.speculation.policy import PROBING, PROBING_SMALL, Adaptive, Policy


@dataclass
class World:
    """Rounds of n sequences, whose drafts are right by chance; the drafter believes `says`."""

    policy: Policy
    costs: Costs
    right: float  # chance of each draft, if those before it were right
    says: float | None = None  # None: the truth
    copied: float | None = None  # chance of what is looked up; None: nothing is found
    found: float = 1.0  # share of the rounds in which something is
    n: int = 1
    timed: bool = False  # whether the policy is told what rounds took
    unsure: float = 0.0  # spread of the chances from round to round
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    asked: int = 0  # drafts, behind the last round
    time: float = 0.0
    tokens: int = 0
    drafting: list[bool] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of each round's first row

    def run(self, rounds: int) -> float:
        """Tokens of a sequence in the time of a plain step, in these rounds."""
        before, start = self.tokens, self.time
        for _ in range(rounds):
            self._round()
        return (self.tokens - before) / self.n / (self.time - start)

    def _round(self) -> None:
        chances = np.clip(self.right + self.unsure * self.rng.normal(size=self.n), 0, 1)
        rows = []
        for chance in chances.tolist():
            said = chance if self.says is None else self.says
            offers = [chain([said**k for k in range(1, self.asked + 1)])] if self.asked else []
            found = self.copied is not None and self.rng.random() < self.found
            offers += [looked_up(3)] if found else []
            rows.append(Row(offers, False))
        choice = self.policy.choose(rows, 0)
        for proposal, chance in zip(choice.taken, chances.tolist(), strict=True):
            self.tokens += 1
            if proposal is None:
                continue
            chance = self.copied if proposal.source == "lookup" else chance
            wrong = self.rng.random(len(proposal.tokens)) >= chance
            accepted = int(wrong.argmax()) if wrong.any() else len(wrong)
            self.tokens += accepted
            self.policy.observe(proposal, accepted)
        self.asked = choice.draft
        self.drafting.append(choice.draft > 0)
        first = choice.taken[0]
        self.sources.append(first.source if first else "plain")
        verify = self.costs.verify(self.n, 1 + choice.width, 0)
        draft = (choice.draft > 0) * self.costs.draft(self.n, 0)
        self.time += (verify + draft) / SECOND
        if self.timed:
            self.policy.timed(verify, draft, 0.0)


def world(costs: Costs, right: float, **more: float) -> World:
    return World(Adaptive(costs, MOST, MOST), costs, right, **more)  # type: ignore[arg-type]


def best_fixed(costs: Costs, right: float, n: int = 1) -> float:
    """Tokens in the time of a plain step with the best fixed width, or none."""
    plain = costs.verify(n, 1, 0)
    rates = [
        sum(right**k for k in range(w + 1))
        * SECOND
        / (costs.verify(n, 1 + w, 0) + costs.draft(n, 0))
        for w in range(1, MOST + 1)
    ]
    return max(SECOND / plain, *rates)


def test_is_near_the_best_fixed_width() -> None:
    """Probing included, after it has learned for a while; and never below plain decoding."""
    shares = []
    for right, token, drafter in product((0.2, 0.5, 0.7, 0.95), (0.02, 0.1, 0.3), (0.05, 0.4, 1)):
        costs = Costs(linear(token), drafter)
        of = world(costs, right, n=1 + len(shares) % 2)
        of.run(300)
        rate = of.run(1500)
        shares.append(rate / best_fixed(costs, right))
        assert rate > 0.98
        assert shares[-1] > 0.9, (right, token, drafter)
    assert np.mean(shares) > 0.985


def test_falls_back_where_nothing_pays_and_probes_now_and_then() -> None:
    costs = Costs(linear(0.3), 0.5)
    of = world(costs, 0.2)
    of.run(300)
    learned, drafting = of.run(5000), of.drafting[300:]
    assert 0.985 < learned <= 1.0
    assert 20 < sum(drafting) < 100  # 0.5 of a step each, half a percent of 5000
    # and finds it when the drafter has become worth its while
    of.right = 0.9
    of.run(1000)
    assert np.mean(of.drafting[-100:]) > 0.9
    assert of.run(2000) > 0.95 * best_fixed(costs, 0.9)


def test_a_drafter_that_says_the_same_is_found_to_have_become_better() -> None:
    """Of drafts that are never verified nothing would be learned."""
    of = world(Costs(linear(0.1), 0.1), 0.02, says=0.5)
    of.run(1000)
    assert of.sources[-200:].count("drafter") < 20
    of.right = 0.9
    of.run(2000)
    assert of.run(1000) > 0.95 * best_fixed(of.costs, 0.9)


@pytest.mark.parametrize("unsure", [0.0, 0.15, 0.3])
def test_does_not_flap_around_break_even(unsure: float) -> None:
    right = 0.6
    costs = Costs(linear(0.1), 0.0)
    while best_fixed(costs, right) > 1.0:  # find the drafter's cost that makes it even
        costs.drafter += 0.01
    of = world(costs, right, unsure=unsure)
    of.run(300)
    rate = of.run(3000)
    assert rate > 0.98
    switches = sum(a != b for a, b in pairwise(of.drafting[300:]))
    assert switches < 3000 / 30


def test_says_is_calibrated() -> None:
    """A drafter that is sure of everything, and one that is unsure, are both found out."""
    for says in (0.99, 0.5):
        costs = Costs(linear(0.15), 0.1)
        of = world(costs, 0.8, says=says)
        of.run(500)
        assert of.run(3000) > 0.97 * best_fixed(costs, 0.8)


def test_lookup_is_taken_when_it_promises_more_and_the_drafter_rests() -> None:
    costs = Costs(linear(0.1), 0.3)
    of = world(costs, 0.7, copied=0.95)
    of.run(500)
    of.run(1000)
    assert of.sources[500:].count("lookup") > 950
    assert sum(of.drafting[500:]) < 50
    # copies are no longer right: back to the drafter
    of.copied = 0.1
    of.run(500)
    of.run(1000)
    assert of.sources[-1000:].count("drafter") > 900
    # nor found at all
    of.copied = None
    of.run(1000)
    assert of.sources[-900:].count("drafter") > 890


def test_a_drafter_that_lost_is_tried_again_where_steps_with_drafts_have_become_cheaper() -> None:
    dear = Costs(linear(0.4), 0.6)
    cheap = Costs([max(0.7 * step, 1) for step in dear.steps], 0.6)
    of = world(dear, 0.73, copied=1.0, found=0.1, timed=True)
    for of.costs, drafts in ((dear, False), (cheap, True), (dear, False), (cheap, True)):
        of.run(1000)
        assert sum(of.drafting[-200:]) > 150 if drafts else sum(of.drafting[-500:]) < 15


def test_features_are_held_while_the_drafter_may_want_them() -> None:
    """Where it pays, and where it may be tried again before the sequence ends."""
    assert Adaptive(Costs(linear(0.3), 0.5), MOST, MOST).holds(1)
    good, bad = (world(Costs(linear(0.1), drafter), 0.7) for drafter in (0.1, 5.0))
    good.run(300)
    assert good.policy.holds(1)
    bad.run(300)
    while not bad.drafting[-1]:
        bad.run(1)
    pause = round((5.0 + 0.1) / PROBING)
    assert [bad.policy.holds(budget) for budget in (1, pause - 10, pause + 10)] == [0, 0, 1]
    bad.run(pause - 20)
    assert [bad.policy.holds(budget) for budget in (10, 30)] == [False, True]


def test_of_a_small_model_features_are_held_less() -> None:
    """Holding them costs something there, as choices do: a tenth of a plain step."""
    costs, rows = Costs(linear(0.1), 0.1), [Row([], False)]
    for choosing, holds, probing in ((1e-4, True, PROBING), (0.1, False, PROBING_SMALL)):
        policy, now, tried = Adaptive(costs, MOST, MOST), 0, [0]
        assert policy.prefill(1, False)  # drafting pays for one sequence, and so far for 16
        while now < 5000 or tried[-1] < now:  # the last time just now
            choice = policy.choose([Row([chain([0.01] * MOST)], False)] * 16, 0)
            for proposal in choice.taken:
                if proposal:
                    policy.observe(proposal, 0)
            took = costs.verify(16, 1 + choice.width, 0)
            policy.timed(took, (choice.draft > 0) * costs.draft(16, 0), choosing * SECOND)
            now += 1 + choice.rest
            tried += [now] if choice.draft else []
            assert now < 10_000
        assert 0 <= tried[-1] - tried[-2] - 0.2 / probing < LONGEST_REST
        assert not policy.prefill(16, False)
        assert policy.prefill(1, False)
        assert policy.holds(1) == holds
        policy.choose(rows, 0)
        assert policy.holds(1)


def test_a_drafter_that_is_dear_to_wake_is_tried_less_often() -> None:
    """When it has rested there are features of many rounds to take in."""
    costs = Costs(linear(0.3), 0.5)

    def tried(waking: float) -> int:
        policy, times, drafted = Adaptive(costs, MOST, MOST), 0, False
        for i in range(5200):
            choice = policy.choose([Row([chain([0.1] * MOST)] if drafted else [], False)], 0)
            if choice.taken[0]:
                policy.observe(choice.taken[0], 0)
            draft = choice.draft and (0.5 if drafted else waking)
            policy.timed(costs.verify(1, 1 + choice.width, 0), draft * SECOND, 0.0)
            drafted = choice.draft > 0
            times += drafted and i >= 200  # it has been given up
        return times

    assert 3 < tried(10.0) < 0.3 * tried(0.5)


def test_prefill_drafts_where_rounds_would() -> None:
    for drafter, right, drafts in ((0.1, 0.9, True), (3.0, 0.5, False)):
        of = world(Costs(linear(0.1), drafter), right)
        of.run(300)
        assert of.policy.prefill(1, False) == drafts


@pytest.mark.parametrize(("rounds", "low", "high"), [(5, 0.0, 0.3), (100, 0.95, 1.0)])
def test_what_the_drafter_takes_behind_prompts_counts(rounds: int, low: float, high: float) -> None:
    """Ten plain steps each, where a round gains about one: too much for texts of five rounds."""
    of, drafted = world(Costs(linear(0.1), 0.1), 0.7), []
    of.run(100)
    for _ in range(200):
        drafted.append(of.policy.prefill(1, False))
        if drafted[-1]:
            of.policy.prefilled(1, False, 10 * SECOND)
        of.run(rounds)
    assert low <= np.mean(drafted[100:]) <= high
