"""Texts of SmolLM2 on a GPU: a CPU's in float32, and in 16 bits drafted as plain ones.

    python -m tests.gpu.texts keep BUILD PROMPTS... TEXTS
    python -m tests.gpu.texts compare BUILD PROMPTS... TEXTS RESULTS
    python -m tests.gpu.texts drafted BUILD PROMPTS... RESULTS

`keep` writes the greedy texts of BUILD, of kind onnxruntime with `quantize: none`. `compare` counts
the texts of another BUILD that differ from those, and says how far apart the log-probabilities of
the two tokens are where they part: in a near-tie rounding chooses. `drafted` counts texts that
drafts change, at several numbers of streams, greedy and sampled.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash_trt.bench.prompts import load_task
from dflash_trt.decoding import Proposer, Request, SamplingParams, Scheduler, in_process
from dflash_trt.decoding.sequence import SequenceState
from dflash_trt.engines import Engine, load_engine
from dflash_trt.speculation import Fixed

COUNT, TOKENS, BEST = 256, 128, 8  # prompts of a file at most; tokens of a text; alternatives
NEAR = 0.01  # of log-probabilities
STREAMS = (1, 8, 32)
TEMPERATURE = 0.8

Prompts = list[list[int]]


def load_prompts(build: Path, files: Sequence[str], tokens: int = TOKENS) -> Prompts:
    info = load_engine(build / "engines" / "target").info
    tokenizer, longest = build / "tokenizer", info.max_seq_len - tokens
    sizes = {"vocab_size": info.vocab_size, "longest": longest, "count": COUNT}
    return [prompt for file in files for prompt in load_task(file, tokenizer, **sizes)]


def decode(
    target: Engine, drafter: Engine | None, requests: Sequence[Request], streams: int = 1
) -> list[SequenceState]:
    """Decode requests, `streams` at a time, with whole blocks of drafts if there is a drafter."""
    info = target.info
    scheduler = Scheduler(
        in_process(target, drafter),
        slots=min(streams, info.slots),
        max_seq_len=info.max_seq_len,
        prefill_chunk=256,
        policy=Fixed(info.block_size - 1 if drafter else 0),
        proposer=Proposer(),
    )
    sequences = [scheduler.submit(request) for request in requests]
    while scheduler.has_work:
        scheduler.step()
    return sequences


def greedy(build: Path, prompts: Prompts, tokens: int = TOKENS) -> list[list[int]]:
    engine = load_engine(build / "engines" / "target")
    return [each.tokens for each in decode(engine, None, [Request(p, tokens) for p in prompts])]


def compare(build: Path, prompts: Prompts, theirs: list[list[int]]) -> dict[str, object]:
    """Return how many texts differ, and the gaps of log-probabilities where they part."""
    engine, gaps = load_engine(build / "engines" / "target"), []
    ours = greedy(build, prompts, len(theirs[0]))
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        if own == other:
            continue
        at = next(i for i, pair in enumerate(zip(own, other, strict=False)) if len({*pair}) > 1)
        request = Request(prompt + own[:at], 1, SamplingParams(logprobs=BEST))
        (sequence,) = decode(engine, None, [request])
        known = dict(zip(sequence.logprob_ids[0], sequence.logprobs[0], strict=True))
        gaps.append(known[own[at]] - known.get(other[at], float("-inf")))
    near = sum(gap < NEAR for gap in gaps)
    return {"texts": len(ours), "differ": len(gaps), "near ties": near, "gaps": gaps}


def drafted(
    build: Path, prompts: Prompts, streams: Sequence[int] = STREAMS, tokens: int = TOKENS
) -> Iterator[dict[str, object]]:
    """Yield how many texts drafts change, by streams and temperature."""
    target, drafter = (load_engine(build / "engines" / role) for role in ("target", "drafter"))
    for temperature in (0.0, TEMPERATURE):
        requests = [
            Request(prompt, tokens, SamplingParams(temperature, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
        plain = [each.tokens for each in decode(target, None, requests)]
        for count in streams:
            texts = decode(target, drafter, requests, count)
            rounds = [n for each in texts for n in each.committed_per_round]
            differ = sum(each.tokens != its for each, its in zip(texts, plain, strict=True))
            yield {
                "temperature": temperature,
                "streams": count,
                "texts": len(texts),
                "differ": differ,
                "tau": sum(rounds) / len(rounds),
            }


def main(task: str, build: Path, *files: str) -> None:
    if task == "keep":
        *prompts, texts = files
        Path(texts).write_text(json.dumps(greedy(build, load_prompts(build, prompts))))
        return
    if task == "compare":
        *prompts, texts, results = files
        theirs = json.loads(Path(texts).read_text())
        found = compare(build, load_prompts(build, prompts), theirs)
        Path(results).write_text(json.dumps(found, indent=1))
        return
    *prompts, results = files
    lines = []
    for line in drafted(build, load_prompts(build, prompts)):
        lines.append(line)
        Path(results).write_text(json.dumps(lines, indent=1))  # if the time is up before the next


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
