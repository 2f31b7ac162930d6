"""How far the adaptive policy is from one that knows the text: tokens in the time of a plain step.

    python scripts/replay_policy.py BUILD PROMPTS [--costs 1:33.5,4:48.3,8:61,16:80.3,draft:14.4]

Greedy texts are decoded once, the drafter run behind every token. Each policy then decodes them
again by the real scheduler, with the record for engines and costs for a clock: the build's own, or
milliseconds by tokens of a step. Of all that was offered to any the oracle takes what is cheapest.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from dflash_trt.bench.prompts import load_task
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import (
    Int64,
    Request,
    RoundOutput,
    RunRound,
    Scheduler,
    VerifyInput,
    in_process,
)
from dflash_trt.decoding import Sequence as Decoded
from dflash_trt.decoding.acceptance import parents_of
from dflash_trt.decoding.messages import NO_DRAFT, DraftOutput, Float32, no_drafts
from dflash_trt.decoding.speculation.costs import Costs
from dflash_trt.decoding.speculation.kept_costs import costs_of
from dflash_trt.decoding.speculation.offers import Choice, Proposal, Row
from dflash_trt.decoding.speculation.policy import Adaptive, Fixed, Policy
from dflash_trt.decoding.speculation.proposals import CANDIDATES, Proposer
from dflash_trt.decoding.speculation.tree import walk
from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.load import load_engine

NEVER = 1e9  # seconds of a drafter that is not to be used


@dataclass
class Text:
    """What the target says to a request, and the drafter behind each token of it."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # the prompt's, too
    drafts: dict[int, tuple[Int64, Float32]] = field(default_factory=dict)  # candidates by position
    offers: dict[int, list[Proposal]] = field(default_factory=dict)  # that any replay had there


class EveryToken(Fixed):
    """Verifies nothing; the drafter runs behind every token."""

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> Choice:
        return Choice([None] * len(rows), self.draft_tokens)


class ByTable(Adaptive):
    """Of engines that only repeat what was recorded, nothing is learned of time."""

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        pass


class Listening(Proposer):
    """Notes what it offers."""

    text: Text

    def rows(self, sequences: Sequence[Decoded], context: int) -> list[Row]:
        (row,) = super().rows(sequences, context)
        self.text.offers.setdefault(sequences[0].position, []).extend(row.offers)
        return [row]


def decode(
    request: Request, run: RunRound, info: EngineInfo, policy: Policy, by: Proposer | None = None
) -> Decoded:
    size, chunk = info.max_seq_len, info.widest
    scheduler = Scheduler(
        run, slots=1, max_seq_len=size, prefill_chunk=chunk, policy=policy, proposer=by
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
    costs: Costs
    seconds: float = 0.0

    def __call__(self, x: VerifyInput) -> RoundOutput:
        (length, forced, place, _), (_, wanted, asked) = x.rows[0].tolist(), x.batch.tolist()
        drafts, text = x.tokens[0, forced:length].tolist(), self.text.tokens[place + forced :]
        path, token = walk(drafts, parents_of(x, 0), lambda path: text[len(path)])
        prefill, end = place < len(self.text.request.prompt), place + forced + len(path)
        self.seconds += 0 if prefill else self.costs.verify(1, length, place)
        self.seconds += self.costs.draft(1, end) if wanted else 0
        drafted = no_drafts(1)
        if wanted and end in self.text.drafts:
            ids, probs = self.text.drafts[end]
            given = probs.reshape(*ids.shape[:1], -1, ids.shape[1])
            few = given[None, :, :asked, :asked].reshape(1, len(ids), -1)
            drafted = DraftOutput(ids[None, :, :asked], few, 0.0)
        results, none = np.array([[len(path), token, 0, *path]]), np.zeros((1, 1, 1))
        return RoundOutput(results, none.astype(np.float32), none.astype(np.int64), 0.0, *drafted)


def replay(
    texts: Sequence[Text], info: EngineInfo, costs: Costs, policy: Policy, by: Proposer | None
) -> tuple[float, list[Decoded]]:
    """Seconds, and what was decoded. ValueError if it is not the text."""
    seconds, decoded = 0.0, list[Decoded]()
    for text in texts:
        run = Replay(text, costs)
        if isinstance(by, Listening):
            by.text = text
        decoded.append(decode(text.request, run, info, policy, by))
        if [*text.request.prompt, *decoded[-1].tokens] != text.tokens:
            raise ValueError("a replay left the text")
        seconds += run.seconds
    return seconds, decoded


def oracle(text: Text, costs: Costs) -> float:
    """Seconds of the cheapest rounds over a text, of all that was ever offered."""
    first, last = len(text.request.prompt), len(text.tokens) - 1
    rest = {(last, ran): 0.0 for ran in (False, True)}  # by position, and if the drafter has run
    behind = {last: 0.0}
    for at in range(last - 1, first - 1, -1):
        plain = costs.verify(1, 1, at) + behind[at + 1]
        rest[at, False] = rest[at, True] = plain
        for offer in text.offers.get(at, []):
            right = {0: 0}  # how deep the right nodes are
            for i, (token, parent) in enumerate(zip(offer.tokens, offer.parents, strict=True), 1):
                if parent in right and token == text.tokens[at + 1 + right[parent]]:
                    right[i] = right[parent] + 1
                to = at + 1 + max(right.values())
                for ran in (True,) if offer.source == "drafter" else (False, True):
                    seconds = costs.verify(1, 1 + i, at) + behind[to]
                    rest[at, ran] = min(rest[at, ran], seconds)
        behind[at] = min(rest[at, False], rest[at, True] + costs.draft(1, at))
    return behind[first]


def ways(info: EngineInfo, costs: Costs) -> dict[str, tuple[Policy, Proposer | None]]:
    """By name; those to listen to all along a text first."""
    slow = replace(costs, verify_seconds=(1e3 * np.array(costs.verify_seconds)).tolist())
    never = replace(costs, draft_seconds=[[NEVER] * len(costs.rows)] * len(costs.contexts))
    alone, every = Speculation(correction=False, tree=False), EveryToken(info.block_size - 1)
    found: dict[str, tuple[Policy, Proposer | None]] = {
        "drafter behind each token": (every, Listening(alone, slow, info)),
        "the same, its trees": (every, Listening(Speculation(correction=False), slow, info)),
        "plain": (Fixed(0), None),
        **{f"fixed {k}": (Fixed(k), None) for k in range(1, info.block_size)},
        "lookup alone": (by_table(info, never), Listening(alone, never, info)),
    }
    for switches in product((False, True), repeat=3):
        on = dict(zip(("lookup", "correction", "tree"), switches, strict=True))
        speculation, name = Speculation(**on), ", ".join(x for x in on if on[x])
        policy = by_table(info, costs)
        found["adaptive: " + (name or "none")] = policy, Listening(speculation, costs, info)
    return found


def by_table(info: EngineInfo, costs: Costs) -> ByTable:
    return ByTable(costs, info.block_size - 1, info.most_verified - 1)


def compare(texts: Sequence[Text], info: EngineInfo, costs: Costs) -> dict[str, float]:
    """Tokens in the time of a plain step, by policy."""
    found = {name: replay(texts, info, costs, *way)[0] for name, way in ways(info, costs).items()}
    found["oracle"] = sum(oracle(text, costs) for text in texts)
    return {name: found["plain"] / seconds for name, seconds in found.items()}


def given(text: str) -> Costs:
    """As --costs says them."""
    times = {key: float(value) / 1e3 for key, value in (x.split(":") for x in text.split(","))}
    draft = times.pop("draft")
    return Costs([0], [1], [*map(int, times)], [[[*times.values()]]], [[draft]])


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
    tables = args.costs or [costs_of(engines, "in_process", run)]
    columns = [compare(texts, info, costs) for costs in tables]
    for name in columns[0]:
        print(f"{name:36}", *(f"{x[name]:8.3f} {x[name] / x['oracle']:6.1%}" for x in columns))


if __name__ == "__main__":
    main()
