"""What the policy chooses, without engines: by costs and chances that are made up here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
import pytest
from conftest import BuildPair
from exact import rounds_of, run_all

from dflash_trt.config.build import Speculation
from dflash_trt.decoding.evidence import LONGEST_REST
from dflash_trt.decoding.policy import (
    CLEARLY,
    PROBING,
    Adaptive,
    Choice,
    Fixed,
    Policy,
    Proposal,
    Row,
)
from dflash_trt.decoding.proposals import strategy
from dflash_trt.decoding.sampling import Sampling
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Request
from dflash_trt.decoding.timings import REFRESH, TIMED
from dflash_trt.engines.onnxruntime import Engine

MOST = 7
SECOND = 1e-2  # of a plain step


@dataclass
class Costs:
    """Plain steps: `steps` of a round by its drafts, each row `more`; and the drafter's."""

    steps: Seq[float]
    drafter: float = 0.0
    more: float = 0.0

    def verify(self, n: int, width: int, context: int) -> float:
        return SECOND * (self.steps[min(width, len(self.steps)) - 1] + self.more * (n - 1))

    def draft(self, n: int, context: int) -> float:
        return SECOND * self.drafter * (1 + self.more * (n - 1))


def all_kept(policy: Policy, choice: Choice) -> None:
    for proposal in choice.taken:
        if proposal is not None:
            policy.observe(proposal, len(proposal.tokens))


def linear(token: float) -> list[float]:
    return [1 + token * drafts for drafts in range(MOST + 1)]


def chain(values: Seq[float], drawn: bool = False) -> Proposal:
    return Proposal("drafter", [5] * len(values), range(len(values)), values, drawn)


def tree(parents: Seq[int], values: Seq[float]) -> Proposal:
    return Proposal("drafter", range(len(values)), parents, values)


def looked_up(match: int, count: int = MOST, drawn: bool = False) -> Proposal:
    return Proposal("lookup", [6] * count, range(count), (), drawn, match)


def widths(choice: Choice) -> list[int]:
    return [len(each.tokens) if each else 0 for each in choice.taken]


# --- one round ------------------------------------------------------------------------------------


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
def test_width_follows_costs_and_chances(steps: Seq[float], values: Seq[float], width: int) -> None:
    choice = Adaptive(Costs(steps), MOST, MOST).choose([Row([chain(values)], False)], 0)
    assert widths(choice) == [width]


def test_a_batch_has_one_width() -> None:
    """Two rows alike, one hopeless: what the three together gain per time, 3 / 1 at width 0."""
    rows = [Row([chain(values)], False) for values in ([0.9, 0.8], [0.9, 0.8], [0.0, 0.0])]
    policy = Adaptive(Costs([1, 1.5, 2.4]), MOST, MOST)
    assert widths(policy.choose(rows, 0)) == [1, 1, 0]  # 4.8 / 1.5, 6.4 / 2.4
    assert widths(policy.choose([rows[0], rows[2]], 0)) == [0, 0]  # 2.9 / 1.5, 3.7 / 2.4
    rows = [rows[0], Row([], False), Row([chain([0.9])], True)]
    assert widths(Adaptive(Costs([1, 1, 1]), MOST, MOST).choose(rows, 0)) == [2, 0, 1]


def test_width_is_the_best_of_all() -> None:
    """Against all widths one by one, of random batches of chains and costs."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        steps = 1 + np.r_[0, np.cumsum(rng.exponential(0.3, MOST))]
        n = int(rng.integers(1, 5))
        chances = rng.beta(2, 1, (n, MOST)).cumprod(1)
        lengths = rng.integers(0, MOST + 1, n)
        rows = [
            Row([chain(line[:length].tolist())] if length else [], False)
            for line, length in zip(chances, lengths, strict=True)
        ]
        choice = Adaptive(Costs(steps.tolist()), MOST, MOST).choose(rows, 0)
        rates = [
            (n + sum(line[: min(w, k)].sum() for line, k in zip(chances, lengths, strict=True)))
            / steps[w]
            for w in range(lengths.max() + 1)
        ]
        best = max(rates)  # which has to be clearly better than plain decoding
        clear = best if best > CLEARLY * rates[0] else rates[0]
        assert rates[choice.width] == pytest.approx(clear)
        assert widths(choice) == [min(choice.width, length) for length in lengths]


def test_the_first_nodes_of_a_tree_are_taken() -> None:
    values = [0.6, 0.3, 0.2, 0.02]
    (taken,) = (
        Adaptive(Costs(linear(0.1)), MOST, MOST)
        .choose([Row([tree([0, 0, 1, 3], values)], False)], 0)
        .taken
    )
    assert taken is not None
    assert (list(taken.tokens), list(taken.parents)) == ([0, 1, 2], [0, 0, 1])


def test_fixed_takes_all() -> None:
    row = Row([chain([0.1] * MOST)], False)
    choice = Fixed(MOST).choose([row, Row([], False)], 0)
    assert (widths(choice), choice.draft) == ([MOST, 0], MOST)
    assert Fixed(0).choose([Row([], False)], 0) == Choice([None], 0)


def test_choices_are_rare_where_they_are_dear_and_nothing_pays() -> None:
    """Of 8 rows they take more than a hundredth of a plain step, of 64 more than twelve."""
    many, one = [Row([chain([0.1])], False)] * 8, [Row([chain([0.1])], False)]
    for times, rests in ((1, [1] * 5), (8, [1, 3, 7, 12, 12]), (512, [1, 3, 7, 15, 31, 63, 63])):
        policy = Adaptive(Costs(linear(1.0), drafter=5.0), MOST, MOST)
        assert [policy.choose(many * times, 0).rest for _ in rests] == rests
    repeating = [Row([looked_up(16)], False)] * 8
    assert policy.choose(repeating, 0).width == 0  # 1.95 / 2
    cheap = Adaptive(Costs(linear(0.1), drafter=5.0), MOST, MOST)
    taken = cheap.choose(repeating, 0)
    assert (taken.width, taken.rest) == (MOST, 0)
    assert cheap.choose(many, 0).rest == 1  # it begins anew
    assert Adaptive(Costs(linear(1.0), drafter=5.0), MOST, MOST).choose(one, 0).rest == 0


def test_a_single_wide_round_does_not_begin_rests_anew() -> None:
    policy = Adaptive(Costs(linear(0.1), drafter=5.0), MOST, MOST)
    rows, repeating = [Row([], False)] * 64, [Row([looked_up(16)], False)] * 64
    assert [policy.choose(rows, 0).rest for _ in range(4)] == [1, 3, 7, 12]
    rests = []
    for offered in (repeating, rows, repeating, repeating, rows):
        choice = policy.choose(offered, 0)
        rests.append(choice.rest)
        all_kept(policy, choice)
    assert rests == [0, 12, 0, 0, 7]


def test_what_choices_are_found_to_take_sets_how_often_there_is_one() -> None:
    """Of one row a tenth of a plain step: ten rounds each, where they bring something."""
    costs = Costs(linear(1.0), drafter=5.0)
    rests = {}
    for share in (0.001, 0.1):
        policy, row = Adaptive(costs, MOST, MOST), Row([chain([0.1])], False)
        for _ in range(2 * TIMED):
            rests[share] = policy.choose([row], 0).rest
            policy.timed(SECOND, 0.0, share * SECOND)
    assert rests == {0.001: 0, 0.1: 10}


def test_choices_that_never_pay_get_rarer_still() -> None:
    policy = Adaptive(Costs(linear(0.1), drafter=5.0), MOST, MOST)
    rows = [Row([], False)] * 64
    rests = [policy.choose(rows, 0).rest for _ in range(16)]
    assert (rests[:4], rests[-1]) == ([1, 3, 7, 12], LONGEST_REST)
    # and are as frequent as before when they have found something
    choice = policy.choose([Row([looked_up(16)], False)] * 64, 0)
    assert choice.width == MOST
    all_kept(policy, choice)
    assert max(policy.choose(rows, 0).rest for _ in range(6)) == 12


def test_plain_steps_are_timed_when_others_were() -> None:
    """What all costs are relative to has to be seen once: wide steps take thrice their time."""
    costs = Costs(linear(0.1))
    policy, rows = Adaptive(costs, MOST, MOST), [Row([chain([0.9, 0.8])], False)]
    widths = []
    for _ in range(2 * REFRESH):
        width = policy.choose(rows, 0).width
        widths.append(width)
        policy.timed(costs.verify(1, 1 + width, 0) * (3 if width else 1), 0.0, 0.0)
    first = [2] * (2 + TIMED) + [0] * TIMED  # the drafter's first two rounds are not counted
    assert widths[: len(first)] == first
    assert widths[-1] == 0  # 2.7 / 3.6


# --- many rounds ----------------------------------------------------------------------------------


@dataclass
class World:
    """Rounds of n sequences, whose drafts are right by chance; the drafter believes `says`."""

    policy: Policy
    costs: Costs
    right: float  # chance of each draft, if those before it were right
    says: float | None = None  # None: the truth
    copied: float | None = None  # chance of what is looked up; None: nothing is found
    n: int = 1
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
            offers += [] if self.copied is None else [looked_up(3)]
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
        self.time += self.costs.verify(self.n, 1 + choice.width, 0) / SECOND
        self.time += (choice.draft > 0) * self.costs.draft(self.n, 0) / SECOND


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


def test_prefill_drafts_where_rounds_would() -> None:
    for drafter, right, drafts in ((0.1, 0.9, True), (3.0, 0.5, False)):
        of = world(Costs(linear(0.1), drafter), right)
        of.run(300)
        assert of.policy.prefill(1, False) == drafts


def test_a_drafter_that_has_to_run_does() -> None:
    policy = Adaptive(Costs(linear(0.3), 5.0), MOST, MOST)
    row = Row([chain([0.1] * MOST)], False)
    for _ in range(20):
        policy.choose([row], 0)
    assert not policy.choose([row], 0).draft
    assert policy.choose([row], 0, feed=True).draft


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


def test_a_drafter_that_is_dear_to_wake_is_tried_less_often() -> None:
    """When it has rested there are features of many rounds to take in."""
    costs = Costs(linear(0.3), 0.5)

    def tried(waking: float) -> int:
        policy, times, drafted = Adaptive(costs, MOST, MOST), 0, False
        for _ in range(5000):
            choice = policy.choose([Row([chain([0.1] * MOST)] if drafted else [], False)], 0)
            if choice.taken[0]:
                policy.observe(choice.taken[0], 0)
            draft = choice.draft and (0.5 if drafted else waking)
            policy.timed(costs.verify(1, 1 + choice.width, 0), draft * SECOND, 0.0)
            drafted = choice.draft > 0
            times += drafted
        return times

    assert 3 < tried(10.0) < 0.3 * tried(0.5)


def test_a_sequence_of_which_features_are_lost_is_not_drafted_for() -> None:
    policy = Adaptive(Costs(linear(0.1), 0.1), MOST, MOST)
    good = Row([chain([0.9**k for k in range(1, 8)])], False)
    assert all(policy.choose([good], 0).draft for _ in range(50))
    assert not any(policy.choose([good, good._replace(lost=True)], 0).draft for _ in range(500))
    assert policy.choose([good], 0).draft


# --- a record -------------------------------------------------------------------------------------


class Recorded:
    """A policy that notes what it is asked and told, and what it answered."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.coupled, self.draft_tokens = policy.coupled, policy.draft_tokens
        self.calls: list[tuple[str, tuple[object, ...], object]] = []

    def choose(self, rows: Seq[Row], context: int, feed: bool = False) -> Choice:
        choice = self._policy.choose(rows, context, feed)
        self.calls.append(("choose", (rows, context, feed), choice))
        return choice

    def prefill(self, n: int, drawn: bool) -> bool:
        drafts = self._policy.prefill(n, drawn)
        self.calls.append(("prefill", (n, drawn), drafts))
        return drafts

    def holds(self, budget: int) -> bool:
        holds = self._policy.holds(budget)
        self.calls.append(("holds", (budget,), holds))
        return holds

    def observe(self, proposal: Proposal, accepted: int) -> None:
        self.calls.append(("observe", (proposal, accepted), None))
        self._policy.observe(proposal, accepted)

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        self.calls.append(("timed", (verify, draft, choosing), None))
        self._policy.timed(verify, draft, choosing)


def test_a_record_replayed_leads_to_the_same_choices(built_pair: BuildPair) -> None:
    """Offers, choices and outcomes of requests greedy and drawn; the new policy sees no engine."""
    built = built_pair(family="qwen3", heads=4, kv_heads=2, tied=True, taps=(0, 2))
    costs = Costs(linear(0.05), 0.2, more=0.1)
    target = Engine(built.target_engine)
    policy, proposer = strategy(Speculation(), target.info, costs)
    recorded = Recorded(policy)
    scheduler = Scheduler(
        rounds_of(built),
        slots=3,
        max_seq_len=target.info.max_seq_len,
        prefill_chunk=9,
        policy=recorded,
        proposer=proposer,
    )
    sampling = (Sampling(), Sampling(0.8, seed=1))
    run_all(scheduler, [Request(x[:20], 60, sampling[i % 2]) for i, x in enumerate(built.texts)])
    again = Adaptive(costs, policy.draft_tokens, target.info.most_verified - 1)
    for name, arguments, answer in recorded.calls:
        assert getattr(again, name)(*arguments) == answer
    choices = [answer for name, _, answer in recorded.calls if name == "choose"]
    assert len(choices) > 50
    assert len({choice.width for choice in choices}) > 3  # type: ignore[union-attr]
