"""What the policy chooses, without engines: by costs and chances that are made up here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
import pytest
from proposals import MOST, SECOND, Costs, chain, linear, looked_up, rows, widths

from dflash_trt.decoding.speculation import Adaptive, Fixed, Policy, Proposal, Row, StepPlan
from dflash_trt.decoding.speculation.costs import STALE, TIMED, WINDOW, CostModel
from dflash_trt.decoding.speculation.policy import CLEARLY, PROBING

# --- one choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "values", "width"),
    [
        (linear(0.1), [0.9, 0.5, 0.05], 2),  # 1.9 / 1.1, 2.4 / 1.2, 2.45 / 1.3
        (linear(0.4), [0.9, 0.5, 0.05], 1),  # 1.9 / 1.4, 2.4 / 1.8
        (linear(1.0), [0.9, 0.5, 0.05], 0),  # 1.9 / 2
        (linear(0.0), [0.9, 0.5, 0.05], 3),
        ([1, 2, 2, 2, 2], [0.9, 0.9, 0.9, 0.9], 4),  # not yet by 1.9 / 2, but by 4.6 / 2
        ([1, 1, 1, 4, 4], [0.9, 0.8, 0.7, 0.6], 2),
        (linear(0.1), [0.05, 0.04], 0),
    ],
)
def test_width_follows_costs_and_chances(
    steps: Sequence[float], values: Sequence[float], width: int
) -> None:
    assert widths(adaptive(Costs(steps)).choose(rows(chain(values)), 0)) == [width]


def test_a_batch_has_one_width() -> None:
    """Two rows alike, one hopeless: what the three together gain per time, 3 / 1 at width 0."""
    good, _, bad = rows(chain([0.9, 0.8]), chain([0.9, 0.8]), chain([0.0, 0.0]))
    policy = adaptive(Costs([1, 1.5, 2.4]))
    assert widths(policy.choose([good, good, bad], 0)) == [1, 1, 0]  # 4.8 / 1.5, 6.4 / 2.4
    assert widths(policy.choose([good, bad], 0)) == [0, 0]  # 2.9 / 1.5, 3.7 / 2.4
    others = [Row([], False), Row([chain([0.9])], True)]
    assert widths(adaptive(Costs([1, 1, 1])).choose([good, *others], 0)) == [2, 0, 1]


def test_width_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps = 1 + np.r_[0, np.cumsum(rng.exponential(0.3, MOST))]
        n = int(rng.integers(1, 5))
        chances = rng.beta(2, 1, (n, MOST)).cumprod(1)
        lengths = rng.integers(0, MOST + 1, n)
        batch = [
            Row([chain(line[:length].tolist())] if length else [], False)
            for line, length in zip(chances, lengths, strict=True)
        ]
        plan = adaptive(Costs(steps.tolist())).choose(batch, 0)
        rates = [
            (n + sum(line[: min(w, k)].sum() for line, k in zip(chances, lengths, strict=True)))
            / steps[w]
            for w in range(lengths.max() + 1)
        ]
        best = max(rates)  # which has to be clearly better than plain decoding
        assert rates[plan.width] == pytest.approx(best if best > CLEARLY * rates[0] else rates[0])
        assert widths(plan) == [min(plan.width, length) for length in lengths]


def test_fixed_takes_all() -> None:
    plan = Fixed(MOST).choose([*rows(chain([0.1] * MOST)), Row([], False)], 0)
    assert (widths(plan), plan.draft_tokens) == ([MOST, 0], MOST)
    assert Fixed(0).choose([Row([], False)], 0) == StepPlan([None], 0)


# --- when the drafter runs, and when there is a choice --------------------------------------------


def test_a_drafter_that_has_to_run_does() -> None:
    policy = closed(Costs(linear(0.3), 5.0), 1)
    assert not policy.choose(rows(chain([0.1])), 0).draft_tokens
    assert policy.choose(rows(chain([0.1])), 0, feed=True).draft_tokens


def test_there_are_no_drafts_beside_a_sequence_that_is_out_of_sync() -> None:
    policy = adaptive(Costs(linear(0.1), 0.1))
    (good,) = rows(chain([0.9**k for k in range(1, 8)]))
    assert all(policy.choose([good], 0).draft_tokens for _ in range(50))
    lost = good._replace(out_of_sync=True)
    assert not any(policy.choose([good, lost], 0).draft_tokens for _ in range(500))
    assert policy.choose([good], 0).draft_tokens


def test_the_drafter_rests_after_texts_that_repeat_themselves() -> None:
    """Not after any copy: then there would be no drafts when it turns out to be wrong."""
    for match, drafts in ((16, False), (1, True)):
        plan = adaptive(Costs(linear(0.001), 0.01)).choose(rows(looked_up(match)), 0)
        assert (plan.width, plan.draft_tokens > 0) == (MOST, drafts)


# --- what steps cost ------------------------------------------------------------------------------


def test_plain_steps_are_timed_when_others_were() -> None:
    """What all costs are relative to has to be seen once: wide steps take thrice their time."""
    costs = Costs(linear(0.1))
    policy, chosen = adaptive(costs), []
    for _ in range(40):
        chosen.append(policy.choose(rows(chain([0.9, 0.8])), 0).width)
        policy.timed(costs.verify(1, 1 + chosen[-1], 0) * (3 if chosen[-1] else 1), 0.0)
    assert chosen[0] == 2
    assert 0 in chosen[TIMED : 2 + 2 * TIMED]
    assert chosen[-1] == 0  # 2.7 / 3.6


def test_plain_steps_after_the_drafter_do_not_count() -> None:
    """They take longer: two rounds in a row verify nothing, and the first does not draft."""
    costs = Costs(linear(0.01), 0.01)
    policy, plans = adaptive(costs), list[StepPlan]()
    for _ in range(3 * STALE):
        plans.append(policy.choose(rows(chain([0.9] * MOST)), 0))
        after = len(plans) > 1 and plans[-2].draft_tokens > 0
        slow = 9.0 if after and not plans[-1].width else 1.0
        policy.timed(slow * costs.verify(1, 1 + plans[-1].width, 0), 0.01 * SECOND)
    later = [(plan.width, plan.draft_tokens > 0) for plan in plans[STALE // 2 :]]
    assert 1 <= later.count((0, False)) == later.count((0, True)) <= 4
    # nine times as long, wide steps would be free
    assert policy._costs.costs(1, 0)[0] == pytest.approx(linear(0.01), rel=0.1)


def test_a_few_slow_plain_steps_do_not_hide_a_cost() -> None:
    profile = Costs(linear(0.3))
    model = CostModel(profile, MOST)
    for slow, cost in ((TIMED, 0.85), (40, 0.7)):  # a machine that was busy, and one that differs
        for _ in range(slow):
            model.add(1, 2, 10, profile.verify(1, 3, 0), 0.0, streak=4)
            model.add(1, 0, 10, SECOND / 0.7, 0.0, streak=0)
        model._corrected.clear()
        expected = [1, *(max(cost * step, 1) for step in linear(0.3)[1:])]
        assert model.costs(1, 10)[0] == pytest.approx(expected)


def test_costs_follow_what_steps_take() -> None:
    """Medians of the last ones, which a single slow step does not move, and the profile again once
    those are old."""
    profile = Costs(linear(0.1), 0.5)
    model = CostModel(profile, MOST)
    for i in range(40):
        odd = 9 if i % 8 == 0 else 1
        model.add(1, 2, 10, odd * 2 * profile.verify(1, 3, 0), odd * 3 * 0.5 * SECOND, streak=4)
        model.add(1, 0, 10, SECOND, 0.0, streak=0)
    steps, draft = model.costs(1, 10)
    assert (steps, draft) == (pytest.approx([1, *(2 * x for x in linear(0.1)[1:])]), 1.5)
    assert model.costs(16, 10)[0] == pytest.approx(linear(0.1))  # of other batches it says nothing
    for _ in range(WINDOW + 8):
        model.add(1, 0, 10, 2 * SECOND, 0.0, streak=0)
    assert model.costs(1, 10)[0] == pytest.approx(linear(0.1))
    assert model.plain_seconds(1, 10) == pytest.approx(2 * SECOND)


def test_times_of_different_moments_are_not_compared() -> None:
    """While others use the machine all steps take three times as long: that says nothing of how
    they compare, whenever plain ones were timed."""
    profile = Costs(linear(0.1), 0.5)
    model, forced = CostModel(profile, MOST), 0
    for i in range(1000):
        load = 3.0 if i // 100 % 2 else 1.0
        width = 0 if model.needs_plain(1) else 4
        forced += not width
        draft = load * 0.5 * SECOND
        model.add(1, width, 10, load * profile.verify(1, 1 + width, 0), draft, 4 if width else 0)
        steps, draft = model.costs(1, 10)
        assert (steps, draft) == (pytest.approx(linear(0.1)), pytest.approx(0.5))
    assert 1000 / STALE <= forced < 15


# --- many rounds ----------------------------------------------------------------------------------


@dataclass
class World:
    """Rounds of n sequences, whose drafts are right by chance; the drafter believes `says`."""

    costs: Costs
    right: float  # chance of each draft, if those before it were right
    says: float | None = None  # None: the truth
    copied: float | None = None  # chance of what is looked up; None: nothing is found
    found: float = 1.0  # share of the rounds in which something is
    n: int = 1
    timed: bool = False  # whether the policy is told what rounds took
    unsure: float = 0.0  # spread of the chances from round to round
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    drafting: list[bool] = field(default_factory=lambda: [False])
    sources: list[str] = field(default_factory=list)  # of each round's first row

    def __post_init__(self) -> None:
        self.policy: Policy = adaptive(self.costs)

    def run(self, rounds: int) -> float:
        """Tokens of a sequence in the time of a plain step, in these rounds."""
        tokens, time = 0, 0.0
        for _ in range(rounds):
            chances = np.clip(self.right + self.unsure * self.rng.normal(size=self.n), 0, 1)
            plan = self.policy.choose([Row(self._proposals(x), False) for x in chances], 0)
            tokens += self.n
            for proposal, chance in zip(plan.chosen, chances.tolist(), strict=True):
                if proposal is not None:
                    chance = self.copied if proposal.source == "lookup" else chance
                    wrong = self.rng.random(len(proposal.tokens)) >= chance
                    accepted = int(wrong.argmax()) if wrong.any() else len(wrong)
                    tokens += accepted
                    self.policy.observe(proposal, accepted)
            self.drafting.append(plan.draft_tokens > 0)
            self.sources.append(plan.chosen[0].source if plan.chosen[0] else "plain")
            verify = self.costs.verify(self.n, 1 + plan.width, 0)
            draft = (plan.draft_tokens > 0) * self.costs.draft(self.n, 0)
            time += (verify + draft) / SECOND
            if self.timed:
                self.policy.timed(verify, draft)
        return tokens / self.n / time

    def _proposals(self, chance: float) -> list[Proposal]:
        said = chance if self.says is None else self.says
        drafted = [chain([said**k for k in range(1, MOST + 1)])] if self.drafting[-1] else []
        found = self.copied is not None and self.rng.random() < self.found
        return [*drafted, *([looked_up(3)] if found else [])]


def best_fixed(costs: Costs, right: float, n: int = 1) -> float:
    """Tokens in the time of a plain step with the best fixed width, or none."""
    rates = [
        sum(right**k for k in range(w + 1))
        * SECOND
        / (costs.verify(n, 1 + w, 0) + costs.draft(n, 0))
        for w in range(1, MOST + 1)
    ]
    return max(SECOND / costs.verify(n, 1, 0), *rates)


def adaptive(costs: Costs) -> Adaptive:
    return Adaptive(costs, MOST, MOST)


def closed(costs: Costs, n: int) -> Adaptive:
    """With a gate that drafts which are never right have closed."""
    policy = adaptive(costs)
    while policy.prefill(n, sampled=False):
        plan = policy.choose(rows(chain([1e-3] * MOST)) * n, 0)
        for proposal in filter(None, plan.chosen):
            policy.observe(proposal, 0)
    return policy


@pytest.mark.models
def test_is_near_the_best_fixed_width() -> None:
    shares = []
    for right, token, drafter in product((0.2, 0.5, 0.7, 0.95), (0.02, 0.1, 0.3), (0.05, 0.4, 1)):
        costs = Costs(linear(token), drafter)
        of = World(costs, right, n=1 + len(shares) % 2)
        of.run(300)
        rate = of.run(1500)
        shares.append(rate / best_fixed(costs, right))
        assert rate > 0.98
        assert shares[-1] > 0.9, (right, token, drafter)
    assert np.mean(shares) > 0.985


def test_falls_back_where_nothing_pays_and_probes_now_and_then() -> None:
    costs = Costs(linear(0.3), 0.5)
    of = World(costs, 0.2)
    assert of.run(160) > 0.9  # nor does finding out cost a short text much
    of.run(140)
    assert 0.985 < of.run(5000) <= 1.0
    assert 20 < sum(of.drafting[300:]) < 100  # 0.5 of a step each, half a percent of 5000
    # and finds it when the drafter has become worth its while
    of.right = 0.9
    of.run(1000)
    assert np.mean(of.drafting[-100:]) > 0.9
    assert of.run(2000) > 0.95 * best_fixed(costs, 0.9)


def test_a_drafter_that_says_the_same_is_found_to_have_become_better() -> None:
    of = World(Costs(linear(0.1), 0.1), 0.02, says=0.5)
    of.run(1000)
    assert of.sources[-200:].count("drafter") < 20
    of.right = 0.9
    of.run(2000)
    assert of.run(1000) > 0.95 * best_fixed(of.costs, 0.9)


def test_a_text_alone_opens_the_gate_for_less_each_time_that_it_loses() -> None:
    policy, tries = closed(Costs(linear(0.1), 0.2), 1), list[int]()
    for _ in range(6):
        policy.begin(sampled=False)
        tries.append(0)
        while policy.prefill(1, sampled=False):
            plan = policy.choose(rows(chain([1e-3] * MOST)), 0)
            tries[-1] += plan.draft_tokens > 0
    assert tries[0] > tries[1] > tries[2] == tries[-1] > 0
    # and for more again after a text that gained
    policy.begin(sampled=False)
    for _ in range(4):
        plan = policy.choose(rows(chain([0.95**k for k in range(1, MOST + 1)])), 0)
        assert plan.chosen[0]
        policy.observe(plan.chosen[0], plan.width)
    policy.begin(sampled=False)
    lost = 0
    while policy.prefill(1, sampled=False):
        policy.choose(rows(chain([1e-3] * MOST)), 0)
        lost += 1
    assert lost > 1


@pytest.mark.parametrize("unsure", [0.0, 0.15, 0.3])
def test_does_not_flap_around_break_even(unsure: float) -> None:
    right = 0.6
    costs = Costs(linear(0.1), 0.0)
    while best_fixed(costs, right) > 1.0:  # find the drafter's cost that makes it even
        costs.drafter += 0.01
    of = World(costs, right, unsure=unsure)
    of.run(300)
    assert of.run(3000) > 0.98
    assert sum(a != b for a, b in pairwise(of.drafting[300:])) < 3000 / 30


@pytest.mark.parametrize("says", [0.99, 0.5])
def test_what_the_drafter_says_is_calibrated(says: float) -> None:
    costs = Costs(linear(0.15), 0.1)
    of = World(costs, 0.8, says=says)
    of.run(500)
    assert of.run(3000) > 0.97 * best_fixed(costs, 0.8)


def test_lookup_is_taken_when_it_promises_more_and_the_drafter_rests() -> None:
    of = World(Costs(linear(0.1), 0.3), 0.7, copied=0.95)
    of.run(1500)
    assert of.sources[500:].count("lookup") > 950
    assert sum(of.drafting[500:]) < 50
    for of.copied in (0.1, None):  # copies are no longer right, nor found at all
        of.run(1500)
        assert of.sources[-900:].count("drafter") > 800


def test_a_drafter_that_lost_is_tried_again_where_steps_have_become_cheaper() -> None:
    dear = Costs(linear(0.4), 0.6)
    cheap = Costs([max(0.6 * step, 1) for step in dear.steps], 0.4)
    of = World(dear, 0.73, copied=1.0, found=0.1, timed=True)
    for of.costs, drafts in ((dear, False), (cheap, True), (dear, False), (cheap, True)):
        of.run(2000)
        assert sum(of.drafting[-200:]) > 150 if drafts else sum(of.drafting[-500:]) < 15


def test_features_are_held_while_the_drafter_may_want_them() -> None:
    """Where it pays, and where it may be tried again before the sequence ends."""
    assert adaptive(Costs(linear(0.3), 0.5)).keeps_features(1)
    good, bad = (World(Costs(linear(0.1), drafter), 0.7) for drafter in (0.1, 5.0))
    good.run(300)
    assert good.policy.keeps_features(1)
    assert good.policy.prefill(1, sampled=False)
    bad.run(300)
    assert not bad.policy.prefill(1, sampled=False)
    while not bad.drafting[-1]:
        bad.run(1)
    pause = round((5.0 + 0.1) / PROBING)
    assert [bad.policy.keeps_features(budget) for budget in (1, pause - 10, pause + 10)] == [
        0,
        0,
        1,
    ]
    bad.run(pause - 20)
    assert [bad.policy.keeps_features(budget) for budget in (10, 30)] == [False, True]


def test_a_drafter_that_is_expensive_to_wake_is_tried_less_often() -> None:
    costs = Costs(linear(0.3), 0.5)

    def tried(waking: float) -> int:
        policy, times, drafted = closed(costs, 1), 0, False
        for _ in range(5000):
            plan = policy.choose([Row([chain([0.1] * MOST)] if drafted else [], False)], 0)
            if plan.chosen[0]:
                policy.observe(plan.chosen[0], 0)
            draft = plan.draft_tokens and (0.5 if drafted else waking)
            policy.timed(costs.verify(1, 1 + plan.width, 0), draft * SECOND)
            drafted = plan.draft_tokens > 0
            times += drafted
        return times

    assert 3 < tried(10.0) < 0.3 * tried(0.5)
