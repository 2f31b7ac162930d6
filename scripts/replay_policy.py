"""How far the adaptive policy is from one that knows the text: tokens in the time of a plain step.

    python scripts/replay_policy.py BUILD PROMPTS [--costs 1:33.5,4:48.3,8:61,16:80.3,draft:14.4]

Greedy texts are decoded once, the drafter run after every token. Each policy then decodes them
again by the real scheduler, with the record for engines and costs for a clock: the build's own, or
milliseconds by tokens of a step. Of all that was proposed to any the oracle takes what is cheapest.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from dflash_trt.bench import load_task
from dflash_trt.config import Speculation
from dflash_trt.decoding import Request, RoundOutput, RunRound, Scheduler, VerifyInput, in_process
from dflash_trt.decoding import Sequence as Decoded
from dflash_trt.decoding.acceptance import parents_of
from dflash_trt.decoding.messages import NO_DRAFT, Float32, Int64, no_drafts
from dflash_trt.decoding.speculation import (
    Adaptive,
    CostProfile,
    Fixed,
    Policy,
    Proposal,
    Proposer,
    Row,
    StepPlan,
    profile_of,
    strategy,
    walk,
)
from dflash_trt.decoding.speculation import acceptance_estimator as estimator
from dflash_trt.decoding.speculation import policy as policies
from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.load import load_engine

CANDIDATES = 8


@dataclass
class Text:
    """What the target says to a request, and the drafter after each token of it."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # the prompt's, too
    drafts: dict[int, tuple[Int64, Float32]] = field(default_factory=dict)  # candidates by position
    proposals: dict[int, list[Proposal]] = field(default_factory=dict)  # that any replay had there


class EveryToken(Fixed):
    """Verifies nothing; the drafter runs after every token."""

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> StepPlan:
        return StepPlan([None] * len(rows), self.draft_tokens)


def decode(
    request: Request, run: RunRound, info: EngineInfo, policy: Policy, by: Proposer | None = None
) -> Decoded:
    scheduler = Scheduler(
        run,
        slots=1,
        max_seq_len=info.max_seq_len,
        prefill_chunk=info.widest,
        policy=policy,
        proposer=by,
    )
    sequence = scheduler.submit(request)
    while scheduler.busy:
        scheduler.step()
    return sequence


def record(run: RunRound, info: EngineInfo, prompts: Sequence[list[int]], new: int) -> list[Text]:
    """Greedy texts of `new` tokens."""
    texts = [Text(Request(prompt, new)) for prompt in prompts]
    every = EveryToken(info.block_size - 1)
    for text in texts:

        def noted(x: VerifyInput, text: Text = text) -> RoundOutput:
            out = run(x._replace(batch=np.array([0, every.draft_tokens, CANDIDATES])))
            if out.candidate_ids[0, 0, 0] != NO_DRAFT:
                end = int(x.rows[0, 2] + x.rows[0, 1])
                text.drafts[end] = out.candidate_ids[0], out.candidate_probs[0]
            return out

        text.tokens = [*text.request.prompt, *decode(text.request, noted, info, every).tokens]
    return texts


@dataclass
class Replay:
    """A `RunRound` over a recorded text, which adds up what rounds cost."""

    text: Text
    costs: CostProfile
    seconds: float = 0.0

    def __call__(self, x: VerifyInput) -> RoundOutput:
        (length, known, place, _), (_, asked, count) = x.rows[0].tolist(), x.batch.tolist()
        drafts, text = x.tokens[0, known:length].tolist(), self.text.tokens[place + known :]
        path, token = walk(drafts, parents_of(x, 0), lambda path: text[len(path)])
        prefill, end = place < len(self.text.request.prompt), place + known + len(path)
        verify = 0.0 if prefill else self.costs.verify(1, length, place)
        draft = self.costs.draft(1, end) if asked > 0 else 0.0
        self.seconds += verify + draft
        ids, probs, _ = no_drafts(1)
        if asked > 0 and end in self.text.drafts:
            ids, probs = self.text.drafts[end]
            given = probs.reshape(len(ids), -1, ids.shape[1])[:, :count, :count]
            ids, probs = ids[None, :, :count], given.reshape(1, len(ids), -1)
        results, none = np.array([[len(path), token, 0, *path]]), no_drafts(1)
        return RoundOutput(results, none[1], none[0], verify, ids, probs, draft)


def replay(
    texts: Sequence[Text], costs: CostProfile, info: EngineInfo, policy: Policy, by: Proposer
) -> tuple[float, list[Decoded]]:
    """Seconds, and what was decoded. ValueError if it is not the text."""
    seconds, decoded = 0.0, list[Decoded]()
    rows, timed = by.rows, policy.timed
    for text in texts:
        run, last = Replay(text, costs), SimpleNamespace()

        def noted(sequences: Sequence[Decoded], text: Text = text) -> list[Row]:
            (row,) = rows(sequences)
            text.proposals.setdefault(sequences[0].position, []).extend(row.proposals)
            return [row]

        def called(x: VerifyInput, run: Replay = run, last: SimpleNamespace = last) -> RoundOutput:
            last.output = run(x)
            return last.output

        def by_costs(*_: float, last: SimpleNamespace = last) -> None:
            timed(last.output.verify_seconds, last.output.draft_seconds, 0.0)

        with patch.object(by, "rows", noted), patch.object(policy, "timed", by_costs):
            decoded.append(decode(text.request, called, info, policy, by))
        if [*text.request.prompt, *decoded[-1].tokens] != text.tokens:
            raise ValueError("a replay left the text")
        seconds += run.seconds
    return seconds, decoded


def oracle(text: Text, costs: CostProfile) -> float:
    """Seconds of the cheapest rounds over a text, of all that was ever proposed."""
    first, last = len(text.request.prompt), len(text.tokens) - 1
    rest = {(last, ran): 0.0 for ran in (False, True)}  # by position, and if the drafter has run
    after = {last: 0.0}
    for at in range(last - 1, first - 1, -1):
        plain = costs.verify(1, 1, at) + after[at + 1]
        rest[at, False] = rest[at, True] = plain
        for offer in text.proposals.get(at, []):
            right = {0: 0}  # how deep the right nodes are
            for i, (token, parent) in enumerate(zip(offer.tokens, offer.parents, strict=True), 1):
                if parent in right and token == text.tokens[at + 1 + right[parent]]:
                    right[i] = right[parent] + 1
                to = at + 1 + max(right.values())
                for ran in (True,) if offer.source == "drafter" else (False, True):
                    seconds = costs.verify(1, 1 + i, at) + after[to]
                    rest[at, ran] = min(rest[at, ran], seconds)
        after[at] = min(rest[at, False], rest[at, True] + costs.draft(1, at))
    return after[first]


Made = Callable[[], tuple[Policy, Proposer]]


def strategies(info: EngineInfo, costs: CostProfile) -> Iterator[tuple[str, Made]]:
    """By name; those to listen to all along a text first."""
    block = info.block_size

    def made(**switches: bool) -> tuple[Policy, Proposer]:
        return strategy(Speculation(**switches), info, costs)

    yield "drafter after each token", lambda: (EveryToken(block - 1), made(tree=False)[1])
    yield "the same, its trees", lambda: (EveryToken(block - 1), made()[1])
    yield "plain", lambda: (Fixed(0), Proposer())
    for k in range(1, block):
        yield f"fixed {k}", lambda k=k: (Fixed(k), Proposer())
    yield "adaptive", made
    yield "without lookup", lambda: made(lookup=False)
    yield "without trees", lambda: made(tree=False)
    for name in MECHANISMS:
        yield f"without {name}", made


MECHANISMS: Mapping[str, tuple[object, str, object]] = {
    "the gate": (policies.Gate, "add", lambda *_: None),
    "probes": (policies, "PROBING", 1e-9),
    "a rest where texts repeat": (Adaptive, "_repeats", lambda *_: False),
    "hysteresis": (policies, "CLEARLY", 1.0),
    "contradiction": (Proposal, "contradicted", False),
    "calibration": (estimator._Calibration, "observe", lambda *_: None),
    "the length of a match": (estimator, "MATCHES", (1,)),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """A mechanism taken out."""
    with patch.object(*MECHANISMS[name]):
        yield


def compare(texts: Sequence[Text], info: EngineInfo, costs: CostProfile) -> dict[str, float]:
    """Tokens in the time of a plain step, by policy."""
    found = {}
    for name, make in strategies(info, costs):
        taken_out = MECHANISMS.get(name.removeprefix("without "))
        with patch.object(*taken_out) if taken_out else patch("os.sep", "/"):
            found[name] = replay(texts, costs, info, *make())[0]
    found["oracle"] = sum(oracle(text, costs) for text in texts)
    return {name: found["plain"] / seconds for name, seconds in found.items()}


def given(text: str) -> CostProfile:
    """As --costs says them."""
    times = {key: float(value) / 1e3 for key, value in (x.split(":") for x in text.split(","))}
    draft = times.pop("draft")
    return CostProfile([0], [1], [*map(int, times)], [[[*times.values()]]], [[draft]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("prompts", help="as `dflash-trt bench engine --prompts` takes them")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--costs", type=given, action="append")
    args = parser.parse_args()
    engines = args.build / "engines"
    target, drafter = load_engine(engines / "target"), load_engine(engines / "drafter")
    info, run, longest = target.info, in_process(target, drafter), target.info.max_seq_len
    sizes = {"vocab_size": info.vocab_size, "longest": longest - args.tokens, "count": 40}
    prompts = load_task(args.prompts, args.build / "tokenizer", **sizes)
    texts = record(run, info, prompts, args.tokens)
    tables = args.costs or [profile_of(engines, "in_process", run)]
    columns = [compare(texts, info, costs) for costs in tables]
    for name in columns[0]:
        print(f"{name:36}", *(f"{x[name]:8.3f} {x[name] / x['oracle']:6.1%}" for x in columns))


if __name__ == "__main__":
    main()
