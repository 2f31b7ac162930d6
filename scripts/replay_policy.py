"""How far the adaptive policy is from one that knows the text: tokens in the time of a plain step.

    python scripts/replay_policy.py BUILD PROMPTS [--streams N]
        [--costs 1:33.5,4:48.3,8:61,16:80.3,draft:14.4]

Greedy texts are decoded once, the drafter run after every token. Each policy then decodes them
again by the real scheduler, with the record for engines and costs for a clock: the build's own, or
milliseconds by tokens of a step. Of all that was proposed to any the oracle takes what is cheapest.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np

from dflash_trt.bench import load_task
from dflash_trt.config import Speculation
from dflash_trt.decoding import (
    Candidates,
    DraftResult,
    Features,
    Proposer,
    Request,
    Round,
    RoundResult,
    RunRound,
    Scheduler,
    SequenceResult,
    SequenceState,
    in_process,
    measure,
    strategy,
)
from dflash_trt.decoding.acceptance import Accepted, accept_greedy
from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.step import load_engine
from dflash_trt.speculation import (
    Adaptive,
    Choice,
    CostProfile,
    Fixed,
    NextStep,
    Policy,
    Proposal,
    SequenceView,
    estimator,
)
from dflash_trt.speculation import policy as policies
from dflash_trt.speculation.costs import CostModel

CANDIDATES = 8


@dataclass
class Text:
    """The target's answer to a request, and the drafter's candidates after each token of it."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # the prompt's, too
    drafts: dict[int, Candidates] = field(default_factory=dict)  # by position
    proposals: dict[int, list[Proposal]] = field(default_factory=dict)  # that any replay had there


class EveryToken(Fixed):
    """A policy that verifies nothing and runs the drafter after every token."""

    def choose(self, step: NextStep) -> Choice:
        return Choice([None] * len(step.sequences), self.draft_tokens)


def decode(
    requests: Sequence[Request],
    run: RunRound,
    info: EngineInfo,
    policy: Policy,
    by: Proposer | None = None,
    streams: int = 1,
) -> list[SequenceState]:
    scheduler = Scheduler(
        run,
        slots=streams,
        max_seq_len=info.max_seq_len,
        prefill_chunk=info.widest,
        policy=policy,
        proposer=by,
    )
    sequences = [scheduler.submit(request) for request in requests]
    while scheduler.has_work:
        scheduler.step()
    return sequences


def record(run: RunRound, info: EngineInfo, prompts: Sequence[list[int]], new: int) -> list[Text]:
    """Record greedy texts of `new` tokens."""
    texts = [Text(Request(prompt, new)) for prompt in prompts]
    every = EveryToken(info.block_size - 1)
    for text in texts:

        def noted(round: Round, text: Text = text) -> RoundResult:
            result = run(
                Round(0, round.sequences, Features.DRAFT, every.draft_tokens, candidates=CANDIDATES)
            )
            if result.drafts is not None:
                (sequence,) = round.sequences
                text.drafts[sequence.position + sequence.known] = result.drafts.candidates[0]
            return result

        (decoded,) = decode([text.request], noted, info, every)
        text.tokens = [*text.request.prompt, *decoded.tokens]
    return texts


@dataclass
class Replay:
    """A `RunRound` over recorded texts, which adds up what rounds cost; prompts are free."""

    texts: Sequence[Text]
    costs: CostProfile
    draft_tokens: int
    seconds: float = 0.0
    last: tuple[float, float] = (0.0, 0.0)  # of the last round: the target's, the drafter's
    slots: dict[int, Text] = field(default_factory=dict)
    buffered: dict[int, int] = field(default_factory=dict)  # features, by the `id` of a text

    def __call__(self, round: Round) -> RoundResult:
        for copy in round.copies:
            if copy.destination is not None:
                self.slots[copy.destination] = self.slots[copy.source]
        results, candidates, prefill = list[SequenceResult](), list[Candidates](), False
        for slot, sequence in enumerate(round.sequences, round.first_slot):
            known = list(sequence.tokens[: sequence.known])
            if not sequence.position:
                self.slots[slot] = next(
                    text for text in self.texts if text.tokens[: sequence.known] == known
                )
            text = self.slots[slot]
            prefill |= sequence.position < len(text.request.prompt)
            follows = text.tokens[sequence.position + sequence.known :]
            right = [*follows, *[follows[-1]] * len(sequence.tokens)]
            accepted = accept_greedy(sequence.drafts, right) or Accepted(0, 0)
            waits = self._wait(text, round.features, sequence.known + accepted.drafts)
            results.append(SequenceResult(accepted.drafts, accepted.token, buffered=waits))
            end = sequence.position + sequence.known + accepted.drafts
            candidates.append(_recorded(text, end, round.candidates))
        n, context = (
            len(round.sequences),
            int(np.mean([sequence.position for sequence in round.sequences])),
        )
        drafts = round.features is Features.DRAFT
        draft = self.costs.draft(n, context) if drafts else 0.0
        self.last = 0.0 if prefill else self.costs.verify(n, round.width, context), draft
        self.seconds += sum(self.last)
        drafted = DraftResult(candidates, draft) if drafts else None
        return RoundResult(results, self.last[0], drafted)

    def _wait(self, text: Text, features: Features, tokens: int) -> int | None:
        """Return how many features of a text wait after a round that adds those of `tokens`."""
        if features is Features.DROP:
            return None
        before = self.buffered.get(id(text), 0)
        self.buffered[id(text)] = 0 if features is Features.DRAFT else before + tokens
        return self.buffered[id(text)]


def _recorded(text: Text, end: int, count: int) -> Candidates:
    """Return the candidates recorded at a position, at most `count`; none if there are none."""
    recorded = text.drafts.get(end)
    if recorded is None:
        return Candidates(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32))
    depth, best = recorded.ids.shape
    count = min(count, best)
    probs = recorded.probs.reshape(depth, -1, best)[:, :count, :count]
    return Candidates(recorded.ids[:, :count], probs.reshape(depth, -1))


def replay(
    texts: Sequence[Text],
    costs: CostProfile,
    info: EngineInfo,
    policy: Policy,
    by: Proposer,
    streams: int = 1,
) -> tuple[float, list[SequenceState]]:
    """Return the seconds and what was decoded; ValueError if it is not the text."""
    run = Replay(texts, costs, info.block_size - 1)
    views, timed = by.views, policy.timed
    of = {tuple(text.request.prompt): text for text in texts}

    def noted(sequences: Sequence[SequenceState]) -> list[SequenceView]:
        proposed = views(sequences)
        for sequence, view in zip(sequences, proposed, strict=True):
            text = of[tuple(sequence.request.prompt)]
            text.proposals.setdefault(sequence.position, []).extend(view.proposals)
        return proposed

    def by_costs(*_: float) -> None:
        timed(*run.last)

    requests = [text.request for text in texts]
    with patch.object(by, "views", noted), patch.object(policy, "timed", by_costs):
        decoded = decode(requests, run, info, policy, by, streams)
    if any([*t.request.prompt, *d.tokens] != t.tokens for t, d in zip(texts, decoded, strict=True)):
        raise ValueError("a replay left the text")
    return run.seconds, decoded


def oracle(text: Text, costs: CostProfile) -> float:
    """Return the seconds of the cheapest rounds over a text, of all that was ever proposed."""
    first, last = len(text.request.prompt), len(text.tokens) - 1
    rest = {(last, ran): 0.0 for ran in (False, True)}  # by position, and if the drafter has run
    after = {last: 0.0}
    for at in range(last - 1, first - 1, -1):
        plain = costs.verify(1, 1, at) + after[at + 1]
        rest[at, False] = rest[at, True] = plain
        for offer in text.proposals.get(at, []):
            right = 0
            for i, token in enumerate(offer.tokens, 1):
                right += right == i - 1 and token == text.tokens[at + i]
                to = at + 1 + right
                for ran in (True,) if offer.source == "drafter" else (False, True):
                    seconds = costs.verify(1, 1 + i, at) + after[to]
                    rest[at, ran] = min(rest[at, ran], seconds)
        after[at] = min(rest[at, False], rest[at, True] + costs.draft(1, at))
    return after[first]


Made = Callable[[], tuple[Policy, Proposer]]


def strategies(info: EngineInfo, costs: CostProfile) -> Iterator[tuple[str, Made]]:
    """Yield policies and proposers by name; ones that need whole texts first."""
    block = info.block_size

    def made(**switches: bool) -> tuple[Policy, Proposer]:
        return strategy(Speculation(**switches), info, costs)

    yield "drafter after each token", lambda: (EveryToken(block - 1), made()[1])
    yield "plain", lambda: (Fixed(0), Proposer())
    for k in range(1, block):
        yield f"fixed {k}", lambda k=k: (Fixed(k), Proposer())
    yield "adaptive", made
    yield "without lookup", lambda: made(lookup=False)
    for name in MECHANISMS:
        yield f"without {name}", made


MECHANISMS: Mapping[str, tuple[object, str, object]] = {
    "asking whether the drafter pays": (Adaptive, "_gain", lambda *_: np.inf),
    "exploring": (policies, "EXPLORING", 1e-9),
    "a margin": (policies, "CLEARLY", 1.0),
    "a plain step now and then": (CostModel, "needs_plain", lambda *_, **__: False),
    "what rounds cost beyond their parts": (CostModel, "overrun", lambda *_, **__: 1.0),
    "calibration": (estimator._Calibration, "observe", lambda *_: None),
    "the length of a match": (estimator, "MATCHES", (1,)),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    with patch.object(*MECHANISMS[name]):
        yield


def compare(
    texts: Sequence[Text], info: EngineInfo, costs: CostProfile, streams: int = 1
) -> dict[str, float]:
    """Print speeds over plain decoding by policy; the oracle is known for one stream only."""
    seconds_by_name = {}
    for name, make in strategies(info, costs):
        taken_out = MECHANISMS.get(name.removeprefix("without "))
        with patch.object(*taken_out) if taken_out else patch("os.sep", "/"):
            seconds_by_name[name] = replay(texts, costs, info, *make(), streams)[0]
    if streams == 1:
        seconds_by_name["oracle"] = sum(oracle(text, costs) for text in texts)
    return {name: seconds_by_name["plain"] / seconds for name, seconds in seconds_by_name.items()}


def given(text: str) -> CostProfile:
    """Parse the value of --costs."""
    times = {key: float(value) / 1e3 for key, value in (x.split(":") for x in text.split(","))}
    draft = times.pop("draft")
    widths = [*map(int, times)]
    return CostProfile([0], [1], widths, [[[*times.values()]]], [[draft]], [0.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("prompts", help="as `dflash-trt bench engine --prompts` takes them")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--costs", type=given, action="append", help="for one stream")
    parser.add_argument("--streams", type=int, default=1, help="texts at a time")
    args = parser.parse_args()
    engines = args.build / "engines"
    target, drafter = load_engine(engines / "target"), load_engine(engines / "drafter")
    info, run, longest = target.info, in_process(target, drafter), target.info.max_seq_len
    sizes = {"vocab_size": info.vocab_size, "longest": longest - args.tokens, "count": 40}
    prompts = load_task(args.prompts, args.build / "tokenizer", **sizes)
    texts = record(run, info, prompts, args.tokens)
    tables = args.costs or [measure(run, info)]
    columns = [compare(texts, info, costs, args.streams) for costs in tables]
    for name in columns[0]:
        print(f"{name:36}", *(f"{x[name]:8.3f}" for x in columns))


if __name__ == "__main__":
    main()
