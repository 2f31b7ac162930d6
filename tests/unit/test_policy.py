"""What the policy chooses, without engines: by costs and chances that are made up here."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from dflash_trt.engines import MAX_BUFFERED
from dflash_trt.speculation import (
    Adaptive,
    Decision,
    Features,
    Fixed,
    NextStep,
    Policy,
    Proposal,
    SequenceView,
)
from dflash_trt.speculation.costs import STALE, TIMED, WINDOW, CostModel
from dflash_trt.speculation.policy import CLEARLY
from tests.support.proposals import MOST, SECOND, Costs, chain, draft_lens, linear, looked_up, views

PLAIN = SequenceView(budget=1000)  # nothing is proposed for it


def test_a_batch_has_one_draft_length() -> None:
    """Two rows alike and one hopeless: the three together gain per time.

    Tokens are the sequences' harmonic mean; without drafts it is 1.
    """
    good, _, bad = views(chain([0.9, 0.8]), chain([0.9, 0.8]), chain([0.0, 0.0]))
    costs = Costs([1, 1.38, 2.4])
    three = adaptive(costs).decide(NextStep([good, good, bad]))
    assert draft_lens(three) == [1, 1, 0]  # 1.46 / 1.38, 1.66 / 2.4
    two = adaptive(costs).decide(NextStep([good, bad]))
    assert draft_lens(two) == [0, 0]  # 1.31 / 1.38, 1.46 / 2.4
    others = [PLAIN, SequenceView([chain([0.9])], sampled=True, budget=1000)]
    assert draft_lens(adaptive(Costs([1, 1, 1])).decide(NextStep([good, *others]))) == [2, 0, 1]


def test_some_rows_are_not_hurried_at_the_cost_of_others() -> None:
    """All tokens together would gain, 5.5 / 1.35 against 4 / 1; the two others lose a quarter."""
    good, bad = views(chain([0.75]), chain([0.0]))
    four = adaptive(Costs([1, 1.35])).decide(NextStep([good, good, bad, bad]))
    assert draft_lens(four) == [0, 0, 0, 0]
    (better,) = views(chain([0.9]))
    for waiting, draft_len in ((False, 0), (True, 1)):  # those who wait are company, 5.8 / 1.35
        plan = adaptive(Costs([1, 1.35])).decide(
            NextStep([better, better, bad, bad], waiting=waiting)
        )
        assert draft_lens(plan)[:2] == [draft_len, draft_len]
    assert draft_lens(adaptive(Costs([1, 1.35])).decide(NextStep([good, good]))) == [1, 1]


def test_the_draft_length_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps = 1 + np.r_[0, np.cumsum(rng.exponential(0.3, MOST))]
        n = int(rng.integers(1, 5))
        chances = rng.beta(2, 1, (n, MOST)).cumprod(1)
        lengths = rng.integers(0, MOST + 1, n)
        batch = [
            SequenceView([chain(line[:length].tolist())] if length else [])
            for line, length in zip(chances, lengths, strict=True)
        ]
        plan = adaptive(Costs(steps.tolist())).decide(NextStep(batch))
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
    step = NextStep([*views(chain([0.1] * MOST)), PLAIN])
    decision = Fixed(MOST).decide(step)
    assert (draft_lens(decision), decision.draft_tokens) == ([MOST, 0], MOST)
    assert decision.features is Features.DRAFT
    assert Fixed(0).decide(NextStep([PLAIN])) == Decision([None], 0, Features.DROP, learns=True)


def test_texts_that_want_no_drafts_get_none() -> None:
    """A batch without any is decoded plainly, and nothing is learned of it."""
    undrafted = SequenceView([chain([1.0])], drafting=False, follows=False)
    assert Fixed(MOST).decide(NextStep([undrafted])) == Decision([None], 0, Features.DROP)


def test_a_request_that_always_wants_drafts_gets_them() -> None:
    """The whole batch does, whatever it costs; the policy learns nothing of it."""
    policy = closed(Costs(linear(0.3), 5.0))
    (sequence,) = views(chain([0.1] * MOST))
    step = NextStep([sequence, sequence._replace(always_drafts=True)])
    decision = policy.decide(step)
    assert draft_lens(decision) == [MOST, MOST]
    assert decision.draft_tokens == MOST
    assert not decision.learns


def test_a_drafter_that_has_to_run_does() -> None:
    """It does before more features are buffered than may be, and before a prompt is cached."""
    policy = closed(Costs(linear(0.3), 0.5))
    (sequence,) = views(chain([0.1]))
    full = sequence._replace(buffered=MAX_BUFFERED - 7)
    assert policy.decide(NextStep([sequence], new_tokens=8)).features is Features.KEEP
    assert policy.decide(NextStep([full], new_tokens=8)).features is Features.DRAFT
    prompt = NextStep([PLAIN], new_tokens=8, is_prompt=True)
    assert policy.decide(prompt).features is Features.KEEP
    cached = policy.decide(prompt._replace(fills_cache=True))
    assert (cached.features, cached.draft_tokens) == (Features.DRAFT, MOST)


def test_features_are_kept_while_the_drafter_may_run_again() -> None:
    """Exploring takes half a percent of the time: half a step is saved up in 100 rounds."""
    policy = closed(Costs(linear(0.3), 0.5))
    assert policy.decide(NextStep([PLAIN._replace(budget=400)])).features is Features.KEEP
    assert policy.decide(NextStep([PLAIN._replace(budget=40)])).features is Features.DROP
    lost = PLAIN._replace(follows=False)
    assert policy.decide(NextStep([lost])).features is Features.DROP


def test_a_drafter_that_had_to_run_counts_as_exploring() -> None:
    """Features that were buffered make it dear: 4 steps, which are saved up in 800 rounds."""
    policy = closed(Costs(linear(0.3), 0.5))
    full = PLAIN._replace(buffered=MAX_BUFFERED)
    assert policy.decide(NextStep([full], new_tokens=8)).draft_tokens
    policy.timed(SECOND, 4 * SECOND)
    policy.decide(NextStep([PLAIN]))
    assert not policy.keeps_features(600)
    assert policy.keeps_features(1000)


def test_the_first_of_a_burst_is_not_drafted_for() -> None:
    """With one sequence drafts pay, with eight they do not: the drafter would stop right away."""

    class ForFew(Costs):
        def draft(self, n: int, context: int) -> float:
            return SECOND * (0.1 if n < 4 else 9.0)

    policy = adaptive(ForFew(linear(0.01)))
    (good,) = views(chain([0.9**k for k in range(1, 8)]))
    assert policy.decide(NextStep([good])).draft_tokens
    assert not policy.decide(NextStep([good], coming=7)).draft_tokens
    assert policy.decide(NextStep([good], coming=1)).draft_tokens
    for coming, drafts in ((0, True), (7, False)):
        prompt = NextStep([PLAIN], coming=coming, is_prompt=True)
        assert (policy.decide(prompt).draft_tokens > 0) == drafts


def test_what_one_batch_teaches_holds_for_others() -> None:
    """Acceptance is the texts', whatever the batch: bad drafts for one are not tried for four."""
    costs = Costs(linear(0.1), 0.5)
    (good,) = views(chain([0.9**k for k in range(1, 8)]))
    assert adaptive(costs).decide(NextStep([good] * 4)).draft_tokens
    policy = closed(costs)
    assert not policy.decide(NextStep([PLAIN] * 4)).draft_tokens


def test_a_sequence_that_the_drafter_does_not_follow_counts_as_undrafted() -> None:
    """Beside it drafts for others hold it up, and pay only where they cost next to nothing."""
    (good,) = views(chain([0.9**k for k in range(1, 8)]))
    lost = PLAIN._replace(follows=False)
    dear, cheap = adaptive(Costs(linear(0.1), 0.8)), adaptive(Costs(linear(0.01), 0.01))
    for policy, drafts in ((dear, False), (cheap, True)):
        assert policy.decide(NextStep([good])).draft_tokens
        assert (policy.decide(NextStep([PLAIN, lost])).draft_tokens > 0) == drafts


def test_the_drafter_rests_while_copies_are_better() -> None:
    """Not beside every copy, or there would be no drafts when one turns out wrong."""
    for match, drafts in ((16, False), (1, True)):
        decision = adaptive(Costs(linear(0.001), 0.51)).decide(NextStep(views(looked_up(match))))
        assert (decision.draft_len, decision.draft_tokens > 0) == (MOST, drafts)


def test_plain_steps_are_timed_when_others_were() -> None:
    """All costs are relative to them, and wide steps take three times as long."""
    costs = Costs(linear(0.1))
    policy, chosen = adaptive(costs), []
    for _ in range(40):
        chosen.append(policy.decide(NextStep(views(chain([0.9, 0.8])))).draft_len)
        policy.timed(costs.verify(1, 1 + chosen[-1], 0) * (3 if chosen[-1] else 1), 0.0)
    assert chosen[0] == 2
    assert 0 in chosen[TIMED : 2 + 2 * TIMED]
    assert chosen[-1] == 0  # 2.7 / 3.6


def test_plain_steps_after_the_drafter_do_not_count() -> None:
    """They take longer: two rounds in a row verify nothing, and the first does not draft."""
    costs = Costs(linear(0.01), 0.01)
    policy, plans = adaptive(costs), list[Decision]()
    for _ in range(3 * STALE):
        plans.append(policy.decide(NextStep(views(chain([0.9] * MOST)))))
        after = len(plans) > 1 and plans[-2].draft_tokens > 0
        slow = 9.0 if after and not plans[-1].draft_len else 1.0
        policy.timed(slow * costs.verify(1, 1 + plans[-1].draft_len, 0), 0.01 * SECOND)
    later = [(plan.draft_len, plan.draft_tokens > 0) for plan in plans[STALE // 2 :]]
    assert 1 <= later.count((0, False)) == later.count((0, True)) <= 4
    # were a plain step nine times as long, wide ones would be free
    assert policy.decide(NextStep(views(chain([0.005] * MOST)))).draft_len == 0


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
    (greedy,) = views(chain([0.5]))
    sampled = SequenceView([chain([0.5])._replace(sampled=True)], sampled=True)
    assert draft_lens(policy.decide(NextStep([greedy]))) == [0]  # 1.5 / 1.6
    assert draft_lens(policy.decide(NextStep([sampled]))) == [1]  # 1.5 / (4.6 / 4)


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
            sequence = SequenceView(self._proposals(), budget=10_000)
            plan = self.policy.decide(NextStep([sequence]))
            if proposal := plan.proposals[0]:
                chance = self.copied if proposal.source == "lookup" else self.right
                wrong = self.rng.random(len(proposal.tokens)) >= chance
                accepted = int(wrong.argmax()) if wrong.any() else len(wrong)
                tokens += accepted
                self.policy.observe(proposal, accepted)
            self.drafting.append(plan.draft_tokens > 0)
            self.sources.append(proposal.source if proposal else "plain")
            verify = self.costs.verify(1, 1 + plan.draft_len, 0)
            draft = (plan.draft_tokens > 0) * self.costs.draft(1, 0)
            self.policy.timed(verify, draft)
            time += (verify + draft) / SECOND
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
    """Return a policy that has seen only wrong drafts, and has nothing left to explore."""
    policy = adaptive(costs)
    hopeless = NextStep(views(chain([1e-3] * MOST)))
    for _ in range(1000):
        if not policy.decide(hopeless).draft_tokens:
            return policy
        policy.timed(SECOND, costs.drafter * SECOND)
    raise AssertionError("it drafts without end")


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
    """With eight sequences a draft costs half a step: not even good ones are as fast as none."""
    prompt = NextStep([PLAIN], coming=7, is_prompt=True)
    assert not adaptive(Costs(linear(0.6), 0.4)).decide(prompt).draft_tokens
    assert adaptive(Costs(linear(0.1), 0.1)).decide(prompt).draft_tokens
