"""One pair in each precision: size, agreement, acceptance, speed; docs/tensorrt_llm.md shows it.

    python scripts/quantization_table.py TARGET DRAFTER [--plain DIR] [--prompts FILE] [--only int8]

TARGET may be a GGUF file, whose int4 and int8 blocks are kept; ModelOpt then needs `--plain`, the
same in safetensors.

Rows of our own engine run with those weights. fp8, nvfp4 and w4a16 are ModelOpt's, read back and
made plain: their speed here says nothing and is left out. Speeds are of plain decoding, one stream,
and worth something on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from safetensors.numpy import save_file

from dflash_trt.build.acceptance_probe import decode, longest_sequence
from dflash_trt.build.engines import build_drafter, build_target
from dflash_trt.build.precision import BITS
from dflash_trt.build.quantization import calibration_texts
from dflash_trt.checkpoints import (
    Target,
    load_drafter,
    load_target,
    locate_argument,
    summarize_target,
)
from dflash_trt.config import Quantize, Speculation
from dflash_trt.decoding import Request, Scheduler, in_process
from dflash_trt.decoding.speculation import strategy
from dflash_trt.engines import load_engines, read_info
from dflash_trt.engines.accuracy import compare, original_logits, teacher_forced
from dflash_trt.engines.onnxruntime import KIND, load_session
from dflash_trt.graphs import Storage
from dflash_trt.tensorrt_llm import quantize_target

MODELOPT = ("fp8", "nvfp4", "w4a16")
ROWS = ("float32", "bf16", "int8", "int4", *MODELOPT)
TOKENS = 64
LEFT_OUT = (".safetensors", ".gguf")  # weights, which are written anew


def quiet(step: str, done: int, total: int) -> None:
    print(f"\r{step} {done}/{total}", end="   ", file=sys.stderr)


def in_bf16(target: Target, directory: Path) -> Target:
    """A copy whose weights are rounded."""
    names = target.weights.names
    tensors = {n: target.weights.read(n).astype(ml_dtypes.bfloat16) for n in names}
    small = (file for file in target.directory.iterdir() if file.suffix not in LEFT_OUT)
    directory.mkdir()
    for file in small:
        shutil.copy(file, directory)
    save_file(tensors, directory / "model.safetensors")
    return load_target(directory)


def size(target: Target, engine: Path, row: str) -> int:
    """Bytes of the target's weights in that precision."""
    files = target.directory if row in (*MODELOPT, "bf16") else engine
    return sum(f.stat().st_size for f in files.iterdir() if f.suffix in (".safetensors", ".data"))


def answers(engines: Path, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Tau and tokens of greedy decoding in whole blocks, several prompts at a time."""
    target, drafter = load_engines(engines)
    policy, proposer = strategy(Speculation(policy="fixed"), target.info, None)
    scheduler = Scheduler(
        in_process(target, drafter),
        slots=target.info.slots,
        max_seq_len=target.info.max_seq_len,
        prefill_chunk=target.info.widest,
        policy=policy,
        proposer=proposer,
    )
    decoded = [scheduler.submit(Request(prompt, TOKENS)) for prompt in prompts]
    while scheduler.busy:
        scheduler.step()
    rounds = sum(len(each.committed_per_round) for each in decoded)
    tokens = [each.tokens for each in decoded]
    return (sum(map(len, tokens)) - len(tokens)) / rounds, tokens


def agreement(engine: Path, prompts: list[list[int]], answered: list[list[int]]) -> float:
    """Share of the answers' tokens that are the engine's greedy ones, after those before."""
    info = read_info(engine, KIND)
    session = load_session(engine, info, ort.SessionOptions())
    equal = list[np.bool_]()
    for prompt, answer in zip(prompts, answered, strict=True):
        logits = teacher_forced(session, info, [[*prompt, *answer]])
        equal.extend(logits[len(prompt) - 1 : -1].argmax(-1) == answer)
    return float(np.mean(equal))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--plain", type=Path)
    parser.add_argument("--decoded", type=int, default=24, help="prompts that tau is of")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--timed", type=int, default=8, help="prompts that speed is of, in turn")
    asked = parser.parse_args()
    found_at = locate_argument(asked.target, "target", quiet)
    plain = asked.plain or found_at
    original, drafter = load_target(found_at), load_drafter(asked.drafter)
    calibration = {"prompts": asked.prompts}
    recipe = Quantize.model_validate({"method": "fp8", "calibration": calibration})
    texts = calibration_texts(recipe, summarize_target(found_at))
    prompts = (
        [*texts.prompts, *texts.calibrated][: asked.decoded] if asked.prompts else texts.prompts
    )
    length = longest_sequence(original, drafter)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        found: list[dict[str, Any]] = []
        originals = list[list[int]]()  # answers in float32
        for row in ("float32", *(r for r in asked.only.split(",") if r != "float32")):
            engine, target = scratch / row, original
            bits = BITS.get(row)
            if row == "bf16":
                target = in_bf16(original, scratch / "bf16-target")
            if row in MODELOPT:
                made, method = scratch / f"{row}-target" / "x", {"method": row}
                quantize = recipe.model_copy(update=method)
                quantize_target(quantize, plain, made, texts.calibrated, quiet)
                target = load_target(made)
            options: dict[str, Any] = {"slots": 8, "max_seq_len": length, "threads": 2}
            options["storage"] = Storage(link=False, bits=bits)
            build_target(target, drafter.spec, engine / "target", **options)
            build_drafter(drafter, target, engine / "drafter", **options)
            if row == "float32":
                expected = original_logits(engine / "target", texts.held_out)
            cost = compare(engine / "target", expected, texts.held_out)
            tau, tokens = answers(engine, prompts)
            originals = tokens if row == "float32" else originals
            run = decode(engine, prompts[: asked.timed], TOKENS, quiet) if asked.timed else None
            found.append(
                {
                    "precision": row,
                    "bytes": size(target, engine / "target", row),
                    "agreement": cost.agreement,
                    "answers": agreement(engine / "target", prompts, originals),
                    "kl": cost.kl,
                    "perplexity": cost.perplexities[1],
                    "tau": tau,
                    "alone": run.plain_tokens_per_s if run else None,
                }
            )
            print("\n" + json.dumps(found[-1]), file=sys.stderr)
            shutil.rmtree(engine)
    base = found[0]["tau"]
    print(
        "| precision | MB | greedy token equal | of answers | KL | perplexity | tau "
        "| of float32's | tokens/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for each in found:
        here = each["alone"] and each["precision"] not in MODELOPT
        speed = format(each["alone"], ".1f") if here else ""
        print(
            f"| {each['precision']} | {each['bytes'] / 1e6:.0f} | {each['agreement']:.1%} "
            f"| {each['answers']:.1%} | {each['kl']:.2g} | {each['perplexity']:.2f} "
            f"| {each['tau']:.2f} | {each['tau'] / base:.1%} | {speed} |"
        )


if __name__ == "__main__":
    main()
