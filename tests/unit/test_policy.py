"""What the policy chooses, without engines: by costs and chances that are made up here."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from dflash_trt.speculation import Adaptive, Fixed, Policy, Proposal, RoundPlan, SequenceProposals
from dflash_trt.speculation.costs import STALE, TIMED, WINDOW, CostModel
from dflash_trt.speculation.policy import ALONE, CLEARLY, RESTING
from tests.support.proposals import MOST, SECOND, Costs, chain, draft_lens, linear, looked_up, rows


def test_a_batch_has_one_draft_length() -> None:
    """Two rows alike and one hopeless: the three together gain per time, 3 / 1 without drafts.

    Tokens are the rows' harmonic mean, times the rows.
    """
    good, _, bad = rows(chain([0.9, 0.8]), chain([0.9, 0.8]), chain([0.0, 0.0]))
    policy = adaptive(Costs([1, 1.4, 2.4]))
    assert draft_lens(policy.choose([good, good, bad], 0)) == [1, 1, 0]  # 4.6 / 1.4, 5.8 / 2.4
    assert draft_lens(policy.choose([good, bad], 0)) == [0, 0]  # 2.8 / 1.4, 3.3 / 2.4
    others = [SequenceProposals([], False), SequenceProposals([chain([0.9])], True)]
    assert draft_lens(adaptive(Costs([1, 1, 1])).choose([good, *others], 0)) == [2, 0, 1]


def test_some_rows_are_not_hurried_at_the_cost_of_others() -> None:
    """All tokens together would gain, 5.5 / 1.35 against 4 / 1; the two others lose a quarter."""
    good, bad = rows(chain([0.75]), chain([0.0]))
    assert draft_lens(adaptive(Costs([1, 1.35])).choose([good, good, bad, bad], 0)) == [0, 0, 0, 0]
    (better,) = rows(chain([0.9]))
    for waiting, draft_len in ((False, 0), (True, 1)):  # those who wait are company, 5.8 / 1.35
        plan = adaptive(Costs([1, 1.35])).choose([better, better, bad, bad], 0, waiting=waiting)
        assert draft_lens(plan)[:2] == [draft_len, draft_len]
    assert draft_lens(adaptive(Costs([1, 1.35])).choose([good, good], 0)) == [1, 1]


def test_the_draft_length_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps = 1 + np.r_[0, np.cumsum(rng.exponential(0.3, MOST))]
        n = int(rng.integers(1, 5))
        chances = rng.beta(2, 1, (n, MOST)).cumprod(1)
        lengths = rng.integers(0, MOST + 1, n)
        batch = [
            SequenceProposals([chain(line[:length].tolist())] if length else [], False)
            for line, length in zip(chances, lengths, strict=True)
        ]
        plan = adaptive(Costs(steps.tolist())).choose(batch, 0)
        times = [
            [1 / (1 + line[: min(w, k)].sum()) for line, k in zip(chances, lengths, strict=True)]
            for w in range(lengths.max() + 1)
        ]
        rates = [n / np.mean(time) / step for time, step in zip(times, steps, strict=False)]
        best = max(rates)  # which has to be clearly better than plain decoding
        assert rates[plan.draft_len] == pytest.approx(
            best if best > CLEARLY * rates[0] else rates[0]
        )
        assert draft_lens(plan) == [min(plan.draft_len, length) for length in lengths]


def test_fixed_takes_all() -> None:
    plan = Fixed(MOST).choose([*rows(chain([0.1] * MOST)), SequenceProposals([], False)], 0)
    assert (draft_lens(plan), plan.draft_tokens) == ([MOST, 0], MOST)
    assert Fixed(0).choose([SequenceProposals([], False)], 0) == RoundPlan([None], 0)


def test_a_drafter_that_has_to_run_does() -> None:
    policy = closed(Costs(linear(0.3), 5.0))
    assert not policy.choose(rows(chain([0.1])), 0).draft_tokens
    assert policy.choose(rows(chain([0.1])), 0, feed=True).draft_tokens


def test_a_drafter_that_had_to_run_counts_as_a_probe() -> None:
    """Features that waited make it dear: 4 steps, so that the next run is due in 800 rounds."""
    policy = closed(Costs(linear(0.3), 0.5))
    plain = SequenceProposals([], False)
    policy.choose([plain], 0)
    policy.timed(SECOND, 0.0)
    assert policy.keeps_features(400)
    assert policy.choose([plain], 0, feed=True).draft_tokens
    policy.timed(SECOND, 4 * SECOND)
    policy.choose([plain], 0)
    assert not policy.keeps_features(400)
    assert policy.keeps_features(800)


def test_the_first_of_a_burst_is_not_drafted_for() -> None:
    """With one sequence drafts pay, with eight they do not: the drafter would stop right away."""

    class ForFew(Costs):
        def draft(self, n: int, context: int) -> float:
            return SECOND * (0.1 if n < 4 else 9.0)

    policy = adaptive(ForFew(linear(0.01)))
    (good,) = rows(chain([0.9**k for k in range(1, 8)]))
    assert policy.choose([good], 0).draft_tokens
    assert not policy.choose([good], 0, coming=7).draft_tokens
    assert policy.choose([good], 0, coming=7, feed=True).draft_tokens
    assert policy.choose([good], 0, coming=1).draft_tokens


def test_a_larger_batch_begins_as_the_smaller_one_is() -> None:
    """Where drafts did not pay for one sequence, they are not tried for two, nor then for four."""
    costs = Costs(linear(0.1), 0.5)
    (good,) = rows(chain([0.9**k for k in range(1, 8)]))
    assert adaptive(costs).choose([good] * 2, 0).draft_tokens
    policy = closed(costs)
    for n in (2, 4):
        assert not policy.choose([good] * n, 0).draft_tokens
    assert adaptive(costs).choose([good] * 4, 0).draft_tokens


def test_there_are_no_drafts_beside_a_sequence_that_is_out_of_sync() -> None:
    policy = adaptive(Costs(linear(0.1), 0.1))
    (good,) = rows(chain([0.9**k for k in range(1, 8)]))
    assert all(policy.choose([good], 0).draft_tokens for _ in range(50))
    lost = good._replace(out_of_sync=True)
    assert not any(policy.choose([good, lost], 0).draft_tokens for _ in range(500))
    assert policy.choose([good], 0).draft_tokens


def test_the_drafter_rests_after_texts_that_repeat_themselves() -> None:
    """Not after every copy, or there would be no drafts when one turns out wrong."""
    for match, drafts in ((16, False), (1, True)):
        plan = adaptive(Costs(linear(0.001), 0.01)).choose(rows(looked_up(match)), 0)
        assert (plan.draft_len, plan.draft_tokens > 0) == (MOST, drafts)


def resting() -> Adaptive:
    """Return a policy after so many plain rounds that it rests in the next one."""
    policy = adaptive(Costs(linear(0.001), 0.01))
    lost = SequenceProposals([], False, out_of_sync=True)
    for _ in range(RESTING):
        assert draft_lens(policy.choose([lost], 0)) == [0]
        policy.timed(SECOND, 0.0)
    return policy


def test_after_plain_rounds_every_second_one_is_plain_without_a_choice() -> None:
    """A good copy waits for one round; drafts, a new sequence and a full buffer do not."""
    good, drafted = rows(looked_up(16), chain([0.99**k for k in range(1, MOST + 1)]))
    policy = resting()
    assert draft_lens(policy.choose([good], 0)) == [0]
    assert draft_lens(policy.choose([good], 0)) == [MOST]
    assert draft_lens(policy.choose([good], 0)) == [MOST]
    assert draft_lens(resting().choose([drafted], 0)) == [MOST]  # made after a prompt
    assert draft_lens(resting().choose([good, good], 0)) == [MOST, MOST]
    assert resting().choose([good], 0, feed=True).draft_tokens


def test_a_round_without_a_choice_is_not_timed() -> None:
    policy = resting()
    for _ in range(4):
        policy.choose([SequenceProposals([], False, out_of_sync=True)], 0)
        policy.timed(SECOND, 0.0)
    assert policy._costs._now == RESTING + 2


def test_plain_steps_are_timed_when_others_were() -> None:
    """All costs are relative to them, and wide steps take three times as long."""
    costs = Costs(linear(0.1))
    policy, chosen = adaptive(costs), []
    for _ in range(40):
        chosen.append(policy.choose(rows(chain([0.9, 0.8])), 0).draft_len)
        policy.timed(costs.verify(1, 1 + chosen[-1], 0) * (3 if chosen[-1] else 1), 0.0)
    assert chosen[0] == 2
    assert 0 in chosen[TIMED : 2 + 2 * TIMED]
    assert chosen[-1] == 0  # 2.7 / 3.6


def test_plain_steps_after_the_drafter_do_not_count() -> None:
    """They take longer: two rounds in a row verify nothing, and the first does not draft."""
    costs = Costs(linear(0.01), 0.01)
    policy, plans = adaptive(costs), list[RoundPlan]()
    for _ in range(3 * STALE):
        plans.append(policy.choose(rows(chain([0.9] * MOST)), 0))
        after = len(plans) > 1 and plans[-2].draft_tokens > 0
        slow = 9.0 if after and not plans[-1].draft_len else 1.0
        policy.timed(slow * costs.verify(1, 1 + plans[-1].draft_len, 0), 0.01 * SECOND)
    later = [(plan.draft_len, plan.draft_tokens > 0) for plan in plans[STALE // 2 :]]
    assert 1 <= later.count((0, False)) == later.count((0, True)) <= 4
    # nine times as long, wide steps would be free
    assert policy._costs.costs(1, 0)[0] == pytest.approx(linear(0.01), rel=0.1)


def test_costs_follow_what_steps_take() -> None:
    """They are medians, which one slow step does not move; old ones give way to the profile."""
    profile = Costs(linear(0.1), 0.5)
    model = CostModel(profile, MOST)
    for i in range(40):
        odd = 9 if i % 8 == 0 else 1
        model.add(1, 2, 10, odd * 2 * profile.verify(1, 3, 0), odd * 3 * 0.5 * SECOND, streak=4)
        model.add(1, 0, 10, SECOND, 0.0, streak=0)
    costs = model.costs(1, 10)
    assert costs.steps == pytest.approx([1, *(2 * x for x in linear(0.1)[1:])])
    assert costs.draft == 1.5
    # of other batches it says nothing
    assert model.costs(16, 10).steps == pytest.approx(linear(0.1))
    for _ in range(WINDOW + 8):
        model.add(1, 0, 10, 2 * SECOND, 0.0, streak=0)
    assert model.costs(1, 10).steps == pytest.approx(linear(0.1))
    assert model.costs(1, 10).plain_seconds == pytest.approx(2 * SECOND)


def test_costs_of_sampled_rounds_are_apart() -> None:
    """Sampling adds to each step; what sampled ones take corrects no greedy one."""
    profile = Costs(linear(0.1), 0.5, sampled=1.0)
    model = CostModel(profile, MOST)
    assert model.costs(1, 10).steps[2] == pytest.approx(1.2)
    assert model.costs(1, 10, sampled=True).steps[2] == pytest.approx((1.2 + 1) / 2)
    assert model.costs(1, 10, sampled=True).draft == pytest.approx(0.25)
    for _ in range(40):
        model.add(1, 2, 10, 8 * SECOND, SECOND, streak=4, sampled=True)
        model.add(1, 0, 10, 2 * SECOND, 0.0, streak=0, sampled=True)
    assert model.costs(1, 10, sampled=True).steps[2] == pytest.approx(4.0)
    assert model.costs(1, 10).steps == pytest.approx(linear(0.1))
    assert model.overrun(1) == 1.0


def test_drafts_of_sampled_texts_pay_where_sampling_hides_their_cost() -> None:
    """A step that samples is dear anyway, so the same drafts pay in it and not in a greedy one."""
    policy = adaptive(Costs(linear(0.6), sampled=3.0))
    (greedy,) = rows(chain([0.5]))
    sampled = SequenceProposals([chain([0.5])._replace(sampled=True)], True)
    assert draft_lens(policy.choose([greedy], 0)) == [0]  # 1.5 / 1.6
    assert draft_lens(policy.choose([sampled], 0)) == [1]  # 1.5 / (4.6 / 4)


@dataclass
class World:
    """Rounds of a sequence whose drafts are right as often as the drafter predicts."""

    costs: Costs
    right: float  # chance of each draft, if those before it were right
    copied: float | None = None  # chance of what is looked up; None: nothing is found
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    drafting: list[bool] = field(default_factory=lambda: [False])
    sources: list[str] = field(default_factory=list)  # of each round

    def __post_init__(self) -> None:
        self.policy: Policy = adaptive(self.costs)

    def run(self, rounds: int) -> float:
        """Return tokens per plain step of the sequence, in these rounds."""
        tokens, time = rounds, 0.0
        for _ in range(rounds):
            plan = self.policy.choose([SequenceProposals(self._proposals(), False)], 0)
            if proposal := plan.chosen[0]:
                chance = self.copied if proposal.source == "lookup" else self.right
                wrong = self.rng.random(len(proposal.tokens)) >= chance
                accepted = int(wrong.argmax()) if wrong.any() else len(wrong)
                tokens += accepted
                self.policy.observe(proposal, accepted)
            self.drafting.append(plan.draft_tokens > 0)
            self.sources.append(proposal.source if proposal else "plain")
            time += self.costs.verify(1, 1 + plan.draft_len, 0) / SECOND
            time += (plan.draft_tokens > 0) * self.costs.draft(1, 0) / SECOND
        return tokens / time

    def _proposals(self) -> list[Proposal]:
        drafted = [chain([self.right**k for k in range(1, MOST + 1)])] if self.drafting[-1] else []
        return [*drafted, *([] if self.copied is None else [looked_up(3)])]


def best_fixed(costs: Costs, right: float) -> float:
    """Return tokens per plain step with the best fixed draft length, or none."""
    rates = [
        sum(right**k for k in range(w + 1)) / (costs.steps[w] + costs.drafter)
        for w in range(1, MOST + 1)
    ]
    return max(1.0, *rates)


def adaptive(costs: Costs) -> Adaptive:
    return Adaptive(costs, MOST, MOST)


def closed(costs: Costs) -> Adaptive:
    """Return a policy whose gate was closed by drafts that were never right."""
    policy = adaptive(costs)
    while policy.prefill(1, sampled=False):
        for proposal in filter(None, policy.choose(rows(chain([1e-3] * MOST)), 0).chosen):
            policy.observe(proposal, 0)
    return policy


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


def test_lookup_is_taken_when_it_promises_more_and_the_drafter_rests() -> None:
    of = World(Costs(linear(0.1), 0.3), 0.7, copied=0.95)
    of.run(1500)
    assert of.sources[500:].count("lookup") > 950
    assert sum(of.drafting[500:]) < 50
    for of.copied in (0.1, None):  # copies are no longer right, nor found at all
        of.run(1500)
        assert of.sources[-900:].count("drafter") > 800


def test_what_a_drafter_cannot_bring_in_is_not_tried() -> None:
    """With eight rows a draft costs half a step: not even good ones are as fast as none."""
    dear = adaptive(Costs(linear(0.6), 0.4))
    assert not dear.prefill(8, False)
    cheap = adaptive(Costs(linear(0.1), 0.1))
    assert cheap.prefill(8, False)


def test_the_drafter_after_prompts_has_to_be_brought_in_too() -> None:
    policy = adaptive(Costs(linear(0.1), 0.1))
    assert policy.prefill(4, False)
    for _ in range(20):
        policy.prefilled(4, False, 0.2 * SECOND)
    assert not policy.prefill(4, False)
    assert policy.prefill(1, False)  # of other batches nothing is known


def test_a_text_that_begins_a_burst_is_not_drafted_for_again() -> None:
    policy = adaptive(Costs(linear(0.1), 0.1))
    row = SequenceProposals([], False)

    def drafts(joined_after: int) -> list[bool]:
        """Begin a text that others join; return whether the drafter ran for it, by round."""
        policy.begin(sampled=False)
        ran = [policy.prefill(1, sampled=False)]
        for _ in range(joined_after):
            ran.append(policy.choose([row], 8).draft_tokens > 0)
        policy.choose([row], 8, coming=3)
        return ran

    alone = ALONE + 2
    assert drafts(joined_after=2) == [True] * 3  # of the first nothing is known
    assert drafts(joined_after=2) == [False] * 3
    assert drafts(joined_after=alone) == [False] * (1 + ALONE) + [True] * 2
    assert drafts(joined_after=alone) == [True] * (1 + alone)
