"""Measure how many drafts of sampled texts are accepted, beside the most that could be.

    python scripts/sampled_drafts.py BUILD CHATS.jsonl [--count 32]

CHATS has a JSON object with `messages` in each line. The bound is of drafts that know nothing of
the target's noise: at best, a draft is accepted with the mass that the target's distribution and
the drafter's share, both under the request's rules (the best coupling). It is summed up over the
places that were reached, so both numbers are of the same places.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from dflash_trt.bench import load_task
from dflash_trt.builder import read_manifest
from dflash_trt.decoding import (
    Proposer,
    Request,
    SamplingParams,
    Scheduler,
    in_process,
    step_logits,
)
from dflash_trt.decoding.acceptance import Accepted, ReadLogits
from dflash_trt.decoding.arrays import Float32
from dflash_trt.decoding.logits_processor import truncate
from dflash_trt.decoding.messages import Candidates, Round, RoundResult, RoundSequence, RunRound
from dflash_trt.engines import EngineInfo, load_engine
from dflash_trt.machine import cpu_model
from dflash_trt.speculation import Fixed

RULES = {
    "T 1": SamplingParams(temperature=1.0),
    "T 0.6": SamplingParams(temperature=0.6),
    "T 1, top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "T 0.6, top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "T 1, min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
}
MAX_TOKENS = 128


@dataclass
class Counts:
    """Of each depth: rounds that reached it, drafts accepted there, and the mass shared."""

    depth: int
    reached: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    shared: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.reached = [0] * self.depth
        self.accepted = [0] * self.depth
        self.shared = [0.0] * self.depth

    def per_round(self, hits: Sequence[float]) -> float:
        """Return the drafts that a round accepts, of so many hits at each depth."""
        rates = [hit / max(count, 1) for hit, count in zip(hits, self.reached, strict=True)]
        return float(np.cumprod(rates).sum())


class Watch:
    """Counts what rounds of one stream accept of the drafter's proposals."""

    def __init__(self, run: RunRound, depth: int) -> None:
        self.counts = Counts(depth)
        self._run = run
        self._candidates: Candidates | None = None  # for the next round's drafts

    def __call__(self, round: Round) -> RoundResult:
        with patch.object(step_logits, "accept", self._accept):
            result = self._run(round)
        self._candidates = result.drafts.candidates[0] if result.drafts else None
        return result

    def _accept(
        self,
        rows: Sequence[RoundSequence],
        greedy_ids: Sequence[Sequence[int]],
        read_logits: ReadLogits,
    ) -> list[Accepted | None]:
        [result] = results = accept(rows, greedy_ids, read_logits)
        [row] = rows
        assert result is not None
        if row.drafts and self._candidates is not None:
            self._count(row, result, self._candidates, read_logits()[0])
        return results

    def _count(
        self, row: RoundSequence, result: Accepted, candidates: Candidates, logits: Float32
    ) -> None:
        counts = self.counts
        for depth in range(min(result.drafts + 1, len(row.drafts))):
            before = candidates.ids[depth - 1].tolist().index(row.drafts[depth - 1]) if depth else 0
            counts.reached[depth] += 1
            counts.accepted[depth] += depth < result.drafts
            counts.shared[depth] += self._shared(row, candidates, depth, before, logits[depth])

    def _shared(
        self, row: RoundSequence, candidates: Candidates, depth: int, before: int, logits: Float32
    ) -> float:
        """Return the mass that both distributions share under the request's rules."""
        sampling = row.processor.sampling
        probs = candidates.probs[depth].reshape(-1, candidates.ids.shape[1])
        drafters = _under_rules(
            np.log(np.maximum(probs[min(before, len(probs) - 1)], 1e-9)), sampling
        )
        targets = _under_rules(logits, sampling)
        return float(np.minimum(targets[candidates.ids[depth]], drafters).sum())


def _under_rules(logits: Float32, sampling: SamplingParams) -> Float32:
    weights = truncate(np.exp((logits - logits.max()) / sampling.temperature), sampling)
    probabilities: Float32 = weights / weights.sum()
    return probabilities


accept = step_logits.accept


def measure(
    run: RunRound, info: EngineInfo, prompts: Sequence[list[int]], sampling: SamplingParams
) -> Counts:
    depth = info.block_size - 1
    watch = Watch(run, depth)
    scheduler = Scheduler(
        watch,
        slots=1,
        max_seq_len=info.max_seq_len,
        prefill_chunk=info.widest,
        policy=Fixed(depth),
        proposer=Proposer(),
    )
    for seed, prompt in enumerate(prompts):
        scheduler.submit(Request(prompt, MAX_TOKENS, replace(sampling, seed=seed)))
    while scheduler.has_work:
        scheduler.step()
    return watch.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("chats", help="as `dflash-trt bench engine --prompts` takes them")
    parser.add_argument("--count", type=int, default=32)
    args = parser.parse_args()
    manifest = read_manifest(args.build)
    target = load_engine(args.build / "engines" / "target")
    drafter = load_engine(args.build / "engines" / "drafter")
    prompts = load_task(
        args.chats,
        args.build / "tokenizer",
        vocab_size=manifest["target"]["vocab_size"],
        longest=target.info.max_seq_len - MAX_TOKENS,
        count=args.count,
    )
    run = in_process(target, drafter)
    print(f"{cpu_model()}, {len(prompts)} texts of at most {MAX_TOKENS} tokens")
    print(f"{'drafts accepted in a round':30} measured  bound")
    for name, sampling in RULES.items():
        counts = measure(run, target.info, prompts, sampling)
        accepted = counts.per_round(counts.accepted)
        bound = counts.per_round(counts.shared)
        print(f"{name:30} {accepted:8.2f} {bound:6.2f}", flush=True)


if __name__ == "__main__":
    main()
