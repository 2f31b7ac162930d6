"""What log-probabilities add to rounds: `python scripts/logprobs_cost.py BUILD [--sequences 8]`.

Decodes the same texts plainly without log-probabilities, with 5 and with 20 alternatives for each
token, a step of each in turn, and prints the medians of a round's time beside that without.
"""

import argparse
import time
from pathlib import Path
from statistics import median

from dflash_trt.decoding import Request, SamplingParams, Scheduler, in_process
from dflash_trt.engines import load_engine, read_info
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.machine import cpu_model
from dflash_trt.speculation import Fixed

ALTERNATIVES = (None, 5, 20)
PROMPT = 64  # tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    directory = options.build / "engines" / "target"
    use_one_pool(read_info(directory).cpu_threads)
    engine = load_engine(directory)
    size = options.sequences
    if len(ALTERNATIVES) * size > engine.info.slots:
        parser.error(f"the build needs {len(ALTERNATIVES) * size} slots: serving.slots")
    schedulers = []
    for number, alternatives in enumerate(ALTERNATIVES):
        scheduler = Scheduler(
            in_process(engine, None),
            slots=size,
            first_slot=number * size,
            max_seq_len=engine.info.max_seq_len,
            prefill_chunk=engine.info.widest,
            policy=Fixed(0),
        )
        for seed in range(size):
            prompt = [(31 * seed + 7 * place) % engine.info.vocab_size for place in range(PROMPT)]
            sampling = SamplingParams(1.0, seed=seed, top_p=0.95, logprobs=alternatives)
            scheduler.submit(Request(prompt, options.tokens, sampling))
        schedulers.append(scheduler)
    rounds: list[list[float]] = [[] for _ in schedulers]
    while any(scheduler.has_work for scheduler in schedulers):
        for scheduler, times in zip(schedulers, rounds, strict=True):
            started = time.perf_counter()
            scheduler.step()
            if scheduler.report is not None and not scheduler.report.prompt_tokens:
                times.append(time.perf_counter() - started)
    without, *others = rounds
    print(f"{cpu_model()}; {size} sequences, T 1, top_p 0.95; ms of a round")
    print(f"without       {1e3 * median(without):.2f}")
    for alternatives, times in zip(ALTERNATIVES[1:], others, strict=True):
        pairs = zip(times, without, strict=True)
        ratio = median(slow / fast for slow, fast in pairs)
        print(f"logprobs {alternatives:2}   {1e3 * median(times):.2f}   {ratio:.3f} of it")


if __name__ == "__main__":
    main()
