"""What quantized weights cost in tau, the tokens of a round, measured in temporary engines.

Measured on this CPU by our own graphs with dequantized float32 weights, it covers the weights only:
activations and the KV cache are not rounded here, as they are on the GPU.
"""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_trt.chat import as_chat, load_encoding
from dflash_trt.checkpoints import Drafter, Pair, Report, Target
from dflash_trt.config import Quantize, Speculation
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.machine import free_memory
from dflash_trt.prompts import read_prompts

if TYPE_CHECKING:
    from dflash_trt.decoding import LosslessReport

PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a neighbor asking to borrow a ladder.",
    "Translate into French: The train to Lyon leaves at nine o'clock tomorrow morning.",
    'Complete this JSON object: {"name": "Ada", "born": 1815, "known for": [',
)
TOKENS = 64  # decoded per prompt
MAX_SEQ_LEN = 1024


def longest_sequence(target: Target, drafter: Drafter | None) -> int:
    """Return the tokens that both models have positions for, at most `MAX_SEQ_LEN`."""
    known = [model.spec.max_position_embeddings for model in (target, drafter) if model]
    return min(*known, MAX_SEQ_LEN)


def write_engines(
    target: Target, drafter: Drafter | None, engines: Path, max_seq_len: int, report: Report
) -> None:
    """Write `engines/target` and `engines/drafter` for one sequence."""
    # imported here: it loads the graph builder
    from dflash_trt.build.engines import EngineOptions, build_drafter, build_target  # noqa: PLC0415

    options = EngineOptions(slots=1, max_seq_len=max_seq_len)
    report("building engines", 0, 2)
    build_target(target, drafter.spec if drafter else None, engines / "target", options)
    report("building engines", 1, 2)
    if drafter is not None:
        build_drafter(drafter, target, engines / "drafter", options)
    report("building engines", 2, 2)


def decode(
    engines: Path, prompts: Sequence[Sequence[int]], tokens: int, report: Report
) -> "LosslessReport":
    """Decode `tokens` tokens after each prompt, greedily, with whole blocks."""
    from dflash_trt.decoding import check_lossless  # noqa: PLC0415  (it loads the runtime)

    return check_lossless(
        engines,
        prompts,
        tokens,
        Speculation(policy="fixed"),
        lambda done: report("prompts", done, len(prompts)),
    )


def chat_prompts(directory: Path, longest: int) -> list[list[int]]:
    """Return `PROMPTS` as token ids, by a directory's tokenizer and chat template."""
    encode = load_encoding(directory)
    asked = [encode(as_chat(text))[:longest] for text in PROMPTS]
    return [ids for ids in asked if ids]


TEXTS = 14  # pages of the default texts
HELD_OUT = 8  # every n-th prompt is decoded instead of calibrated on
DRAWS, CONFIDENCE = 2000, 0.95  # of the prompts, with replacement
MEMORY = 3.0  # largest memory per byte of a model's float32 weights


@dataclass(frozen=True)
class Texts:
    """Token ids: `calibrated` for calibration, `prompts` to decode."""

    calibrated: list[list[int]]
    prompts: list[list[int]]


@dataclass(frozen=True)
class Cost:
    """Tokens of a round, with the original and with the quantized weights.

    losses: bounds of the fraction of tau that is lost, by a bootstrap over the prompts. skipped:
    why nothing was measured.
    """

    taus: tuple[float, float] | None = None
    losses: tuple[float, float] | None = None
    skipped: str = ""

    def __str__(self) -> str:
        if self.taus is None or self.losses is None:
            return f"not measured: {self.skipped}"
        change, low, high = self.taus[1] / self.taus[0] - 1, -self.losses[1], -self.losses[0]
        return (
            f"tau {self.taus[0]:.2f} -> {self.taus[1]:.2f} ({change:+.1%}; {low:+.1%} to "
            f"{high:+.1%} in {100 * CONFIDENCE:.0f} % of draws of the prompts)"
        )


def calibration_texts(asked: Quantize, target: Target) -> Texts:
    """Choose calibration texts from the configured file, or default ones, reproducibly.

    Raises RequestError for the file.
    """
    encode, choose = load_encoding(target.directory), random.Random(0)
    given, longest = asked.calibration, target.number("max_position_embeddings")
    room, cut = min(longest, MAX_SEQ_LEN) - min(TOKENS, longest // 2), min(given.tokens, longest)
    if given.prompts is None:
        # Python's own documentation: prose and code installed everywhere
        from pydoc_data.topics import topics  # noqa: PLC0415

        pages = choose.sample(sorted(page for page in topics.values() if len(page) > 1000), TEXTS)
        texts = [encode(as_chat(page))[:cut] for page in pages]
        return Texts(texts, chat_prompts(target.directory, room))
    vocab = target.number("vocab_size")
    found = read_prompts(given.prompts, encode, vocab_size=vocab, longest=room)
    if len(found) < 2:
        raise RequestError(
            f"{given.prompts} holds one prompt; some are to calibrate on, some to judge by",
            "Give two or more, better 32",
        )
    choose.shuffle(found)
    apart = -(-len(found) // HELD_OUT)
    return Texts([ids[:cut] for ids in found[apart:]], found[:apart])


def provenance(texts: Texts) -> dict[str, Any]:
    """Return further inputs of the quantized weights, for the manifest."""
    digest = hashlib.sha256(json.dumps(asdict(texts)).encode()).hexdigest()
    return {"texts": digest, "modelopt": version("nvidia-modelopt")}


def measure_cost(before: Pair, after: Pair, texts: Texts, scratch: Path, report: Report) -> Cost:
    """Compare a quantized target with its original; scratch: folder for temporary engines.

    Skipped, with the reason, if our graphs or the memory cannot take the models.
    """
    original, quantized, drafter = before.target, after.target, before.drafter
    if refusal := original.refusal or quantized.refusal:
        return Cost(skipped=f"our graphs refuse the target ({refusal})")
    if drafter.absent:
        return Cost(skipped="there is no drafter")
    if drafter.refusal:
        return Cost(skipped=f"our graphs refuse the drafter ({drafter.refusal})")
    if skipped := _too_large(original):
        return Cost(skipped=skipped)
    length = longest_sequence(original, drafter)

    def run(target: Target, name: str) -> "LosslessReport":
        write_engines(target, drafter, scratch / name, length, report)
        return decode(scratch / name, texts.prompts, min(TOKENS, length // 2), report)

    try:
        return _of_rounds(run(original, "original"), run(quantized, "quantized"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _of_rounds(before: "LosslessReport", after: "LosslessReport") -> Cost:
    """Return the loss of tau over the same prompts, with its confidence interval."""
    counted = [
        np.array([[len(text) - 1 for text in run.outputs], run.prompt_rounds], float)
        for run in (before, after)
    ]  # each [tokens after the first or rounds, prompt]
    prompts = len(before.outputs)
    drawn = np.random.default_rng(0).integers(prompts, size=(DRAWS, prompts))
    taus = [np.divide(*counts[:, drawn].sum(-1)) for counts in counted]
    low, high = np.quantile(1 - taus[1] / taus[0], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Cost((before.tau, after.tau), (float(low), float(high)))


def _too_large(target: Target) -> str:
    """Return why a target cannot run here in float32; "" if it can."""
    numbers = sum(math.prod(target.weights.shape(name)) for name in target.weights.names)
    needed, free = int(numbers * 4 * MEMORY), free_memory()
    if needed <= free:
        return ""
    return f"in float32 it may take {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"


def check_loss(cost: Cost, asked: Quantize) -> None:
    """Raise BuildError if acceptance surely falls by more than the limit."""
    if cost.losses is not None and cost.losses[0] > asked.max_acceptance_loss:
        raise BuildError(
            f"with {asked.method} weights the drafter is accepted too rarely: {cost}; "
            f"engine.quantize.max_acceptance_loss is {asked.max_acceptance_loss:.1%}",
            "Take another method, calibrate on prompts of your own, or raise the limit",
        )
