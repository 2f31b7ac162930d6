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
    Proposer,
    Request,
    RoundOutput,
    RunRound,
    Scheduler,
    SequenceState,
    VerifyInput,
    in_process,
    measure,
    strategy,
)
from dflash_trt.decoding.acceptance import accept_greedy
from dflash_trt.decoding.messages import NO_DRAFT, Float32, Int64, no_drafts, parse_copies
from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.step import load_engine
from dflash_trt.speculation import (
    Adaptive,
    CostProfile,
    Fixed,
    Policy,
    Proposal,
    Row,
    StepPlan,
    estimator,
)
from dflash_trt.speculation import policy as policies
from dflash_trt.speculation.gate import Gate

CANDIDATES = 8


@dataclass
class Text:
    """The target's answer to a request, and the drafter's candidates after each token of it."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # the prompt's, too
    drafts: dict[int, tuple[Int64, Float32]] = field(default_factory=dict)  # candidates by position
    proposals: dict[int, list[Proposal]] = field(default_factory=dict)  # that any replay had there


class EveryToken(Fixed):
    """A policy that verifies nothing and runs the drafter after every token."""

    def choose(
        self,
        rows: Sequence[Row],
        context: int,
        feed: bool = False,
        waiting: bool = False,
        coming: int = 0,
    ) -> StepPlan:
        return StepPlan([None] * len(rows), self.draft_tokens)


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

        def noted(x: VerifyInput, text: Text = text) -> RoundOutput:
            out = run(x._replace(batch=np.array([0, every.draft_tokens, CANDIDATES])))
            if out.candidate_ids[0, 0, 0] != NO_DRAFT:
                end = int(x.rows[0, 2] + x.rows[0, 1])
                text.drafts[end] = out.candidate_ids[0], out.candidate_probs[0]
            return out

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

    def __call__(self, x: VerifyInput) -> RoundOutput:
        (first, asked, count), n = x.batch[:3].tolist(), len(x.rows)
        for source, to, *_ in parse_copies(x.batch[3:].tolist()):
            self.slots[to] = self.slots[source]
        count = min(count, CANDIDATES)  # that were recorded
        ids = np.full((n, self.draft_tokens, count), NO_DRAFT)
        probs = np.zeros((n, self.draft_tokens, count * count), np.float32)
        results, prefill, drafted = list[list[int]](), False, 0
        for i, (length, known, place, *_) in enumerate(x.rows.tolist()):
            tokens = x.tokens[i, :length].tolist()
            if not place:
                begins = tokens[:known]
                self.slots[first + i] = next(
                    text for text in self.texts if text.tokens[:known] == begins
                )
            text = self.slots[first + i]
            prefill |= place < len(text.request.prompt)
            follows = text.tokens[place + known :]
            drafts = tokens[known:]
            own = [*follows, *[follows[-1]] * len(tokens)]
            accepted, token = accept_greedy(drafts, own) or (0, 0)
            results.append([accepted, token, 0])
            end = place + known + accepted
            if asked > 0 and end in text.drafts:
                its, given = text.drafts[end]
                given = given.reshape(len(its), -1, its.shape[1])[:, :count, :count]
                given, drafted = given.reshape(len(its), -1), given.shape[1] * given.shape[2]
                ids[i, : len(its)], probs[i, : len(its), :drafted] = its[:, :count], given
        context, width = int(x.rows[:, 2].mean()), int(x.rows[:, 0].max())
        draft = self.costs.draft(n, context) if asked > 0 else 0.0
        self.last = 0.0 if prefill else self.costs.verify(n, width, context), draft
        self.seconds += sum(self.last)
        none = no_drafts(n)
        given_out = (ids, probs[:, :, :drafted]) if drafted else (none[0], none[1])
        return RoundOutput(np.array(results), none[1], none[0], self.last[0], *given_out, draft)


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
    rows, timed = by.rows, policy.timed
    of = {tuple(text.request.prompt): text for text in texts}

    def noted(sequences: Sequence[SequenceState]) -> list[Row]:
        found = rows(sequences)
        for sequence, row in zip(sequences, found, strict=True):
            text = of[tuple(sequence.request.prompt)]
            text.proposals.setdefault(sequence.position, []).extend(row.proposals)
        return found

    def by_costs(*_: float) -> None:
        timed(*run.last)

    requests = [text.request for text in texts]
    with patch.object(by, "rows", noted), patch.object(policy, "timed", by_costs):
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
    "the gate": (Gate, "add", lambda *_: None),
    "probes": (policies, "PROBING", 1e-9),
    "a rest where texts repeat": (Adaptive, "_repeats", lambda *_: False),
    "hysteresis": (policies, "CLEARLY", 1.0),
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
    found = {}
    for name, make in strategies(info, costs):
        taken_out = MECHANISMS.get(name.removeprefix("without "))
        with patch.object(*taken_out) if taken_out else patch("os.sep", "/"):
            found[name] = replay(texts, costs, info, *make(), streams)[0]
    if streams == 1:
        found["oracle"] = sum(oracle(text, costs) for text in texts)
    return {name: found["plain"] / seconds for name, seconds in found.items()}


def given(text: str) -> CostProfile:
    """Parse the value of --costs."""
    times = {key: float(value) / 1e3 for key, value in (x.split(":") for x in text.split(","))}
    draft = times.pop("draft")
    return CostProfile([0], [1], [*map(int, times)], [[[*times.values()]]], [[draft]])


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
