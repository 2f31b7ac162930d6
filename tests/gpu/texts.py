"""Greedy texts of a build's engine, and how another's differ from them.

    python -m tests.gpu.texts BUILD PROMPTS TEXTS

writes TEXTS, if it is not there. Otherwise it counts the texts of BUILD that differ from those in
it, and says how far apart the log-probabilities of the two tokens are where they part, by BUILD: in
a near-tie rounding chooses.
"""

import json
import sys
from pathlib import Path

from dflash_trt.bench.prompts import load_task
from dflash_trt.decoding import Proposer, Request, SamplingParams, Scheduler, in_process
from dflash_trt.decoding.sequence import SequenceState
from dflash_trt.engines import Engine, load_engine
from dflash_trt.speculation import Fixed

COUNT, TOKENS, BEST = 64, 128, 8
NEAR = 0.01


def decode(engine: Engine, requests: list[Request]) -> list[SequenceState]:
    scheduler = Scheduler(
        in_process(engine, None),
        slots=engine.info.slots,
        max_seq_len=engine.info.max_seq_len,
        prefill_chunk=engine.info.max_seq_len,
        policy=Fixed(0),
        proposer=Proposer(),
    )
    sequences = [scheduler.submit(request) for request in requests]
    while scheduler.has_work:
        scheduler.step()
    return sequences


def main(build: Path, prompts: str, kept: Path) -> None:
    engine = load_engine(build / "engines" / "target")
    info = engine.info
    asked = load_task(
        prompts,
        build / "tokenizer",
        vocab_size=info.vocab_size,
        longest=info.max_seq_len - TOKENS,
        count=COUNT,
    )
    texts = [each.tokens for each in decode(engine, [Request(ids, TOKENS) for ids in asked])]
    if not kept.exists():
        kept.write_text(json.dumps(texts), encoding="utf-8")
        return
    differing, gaps = 0, []
    for prompt, own, other in zip(asked, texts, json.loads(kept.read_text()), strict=True):
        if own == other:
            continue
        differing += 1
        at = next(i for i, pair in enumerate(zip(own, other, strict=True)) if len(set(pair)) > 1)
        request = Request(prompt + own[:at], 1, SamplingParams(logprobs=BEST))
        [sequence] = decode(engine, [request])
        known = dict(zip(sequence.logprob_ids[0], sequence.logprobs[0], strict=True))
        gaps.append(known[own[at]] - known.get(other[at], float("-inf")))
    near = sum(gap < NEAR for gap in gaps)
    print(f"{len(texts)} texts, {differing} differ, {near} of them by less than {NEAR}: {gaps}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
