"""A record of what the policy was told, replayed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from built_pairs import BuildPair
from exact import rounds_of, run_all, scheduler_of
from proposals import SECOND, Costs, linear

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.decoding.speculation import Adaptive, Policy, Proposal, Row, StepPlan, strategy
from dflash_trt.engines.onnxruntime import Engine

DRAFTER = 0.2 * SECOND


class Recorded(Policy):
    """A policy that notes what it is asked and told, and what it answered.

    Rounds take the time that a linear cost of their width says, on any machine.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.draft_tokens)
        self._policy = policy
        self._width = 0
        self.calls: list[tuple[str, tuple[object, ...], object]] = []

    def _noted(self, name: str, *arguments: Any) -> Any:
        answer = getattr(self._policy, name)(*arguments)
        self.calls.append((name, arguments, answer))
        return answer

    def choose(self, rows: Seq[Row], context: int, feed: bool = False) -> StepPlan:
        plan: StepPlan = self._noted("choose", rows, context, feed)
        self._width = plan.width
        return plan

    def prefill(self, n: int, sampled: bool) -> bool:
        return bool(self._noted("prefill", n, sampled))

    def holds(self, budget: int) -> bool:
        return bool(self._noted("holds", budget))

    def observe(self, proposal: Proposal, accepted: int) -> None:
        self._noted("observe", proposal, accepted)

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        seconds = SECOND * (1 + 0.05 * self._width)
        self._noted("timed", seconds, DRAFTER if draft else 0.0, 0.0)


def test_a_record_replayed_leads_to_the_same_choices(built_pair: BuildPair) -> None:
    """Of greedy and sampled requests; the new policy sees no engine."""
    built = built_pair(family="qwen3", heads=4, kv_heads=2, tied=True, taps=(0, 2))
    costs = Costs(linear(0.05), 0.2, more=0.1)
    target = Engine(built.target_engine)
    policy, proposer = strategy(Speculation(), target.info, costs)
    recorded = Recorded(policy)
    longest = target.info.max_seq_len
    scheduler = scheduler_of(
        rounds_of(built), recorded, proposer, slots=3, max_seq_len=longest, prefill_chunk=9
    )
    sampling = (SamplingParams(), SamplingParams(0.8, seed=1))
    run_all(scheduler, [Request(x[:20], 60, sampling[i % 2]) for i, x in enumerate(built.texts)])
    again = Adaptive(costs, policy.draft_tokens, target.info.most_verified - 1)
    for name, arguments, answer in recorded.calls:
        assert getattr(again, name)(*arguments) == answer
    choices = [answer for name, _, answer in recorded.calls if name == "choose"]
    assert len(choices) > 50
    assert len({choice.width for choice in choices}) > 3  # type: ignore[union-attr]
