"""Every policy over one pair, and one whose drafts are all right, beside plain decoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import exact
import pytest
from built_pairs import BuiltPair
from exact import run_all
from guesses import COSTS

from dflash_trt.config.build import Speculation
from dflash_trt.decoding import Grammars, Request, RunRound, Scheduler, SequenceState, in_process
from dflash_trt.decoding.speculation import Fixed, Proposal, Proposer, Row, strategy
from dflash_trt.decoding.speculation.costs import StepCosts
from dflash_trt.engines.onnxruntime import Engine

MAX_SEQ_LEN = 160
POLICIES = {
    "fixed": Speculation(policy="fixed", draft_tokens=None, lookup=False),
    "adaptive": Speculation(),
    "drafter": Speculation(lookup=False),
    "ngram": Speculation(method="ngram"),
    "none": Speculation(method="none"),
}
RIGHT = "all right"  # blocks of seven drafts, all of which are accepted
every = pytest.mark.parametrize("name", [*POLICIES, RIGHT])


class Right(Proposer):
    """Proposes what plain decoding says, by the requests' `id`."""

    def __init__(self, texts: Mapping[int, list[int]]) -> None:
        super().__init__(7)
        self._texts = texts

    def rows(self, sequences: Sequence[SequenceState]) -> list[Row]:
        rest = [
            self._texts[id(s.request)][len(s.tokens) :][: min(7, s.budget - 1)] for s in sequences
        ]
        chains = [Proposal("drafter", x, [1.0] * len(x)) for x in rest]
        return [Row([x] if x.tokens else [], False) for x in chains]


@dataclass(frozen=True)
class Case:
    """A pair, whose drafter knows how the prompt goes on, and what plain decoding says."""

    built: BuiltPair
    target: Engine
    drafter: Engine
    prompt: list[int]

    def scheduler(
        self,
        name: str,
        requests: Sequence[Request] = (),
        texts: Sequence[list[int]] = (),
        costs: StepCosts = COSTS["cheap"],
        watch: Callable[[RunRound], RunRound] = lambda rounds: rounds,
        **options: Any,
    ) -> Scheduler:
        """Of this policy; costs: by default all that can be proposed is worth its while.

        texts: what the requests lead to, of which `RIGHT` proposes the next tokens.
        """
        speculation = POLICIES.get(name, POLICIES["none"])
        policy, proposer = strategy(speculation, self.target.info, costs)
        if name == RIGHT:
            told = dict(zip(map(id, requests), texts, strict=True))
            policy, proposer = Fixed(7), Right(told)
        drafter = self.drafter if speculation.method == "dflash" else None
        rounds = watch(in_process(self.target, drafter))
        options = {"proposer": proposer, "max_seq_len": MAX_SEQ_LEN, **options}
        return exact.scheduler_of(rounds, policy, **options)

    def run(
        self, name: str, requests: Sequence[Request], plain: Sequence[SequenceState], **options: Any
    ) -> list[SequenceState]:
        grammars = options.pop("grammars", None)
        scheduler = self.scheduler(name, requests, [x.tokens for x in plain], **options)
        return run_all(scheduler, requests, grammars)

    def plain(
        self, requests: Sequence[Request], grammars: Grammars | None = None, **options: Any
    ) -> list[SequenceState]:
        return run_all(self.scheduler("none", **options), requests, grammars)


def case_of(built: BuiltPair) -> Case:
    target, drafter = Engine(built.target_engine), Engine(built.drafter_engine)
    return Case(built, target, drafter, built.texts[0][:14])
