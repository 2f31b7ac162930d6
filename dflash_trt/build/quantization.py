"""What a quantized target costs, said at build: its tokens, its distribution, and acceptance.

Measured on this CPU by our own graphs in float32, with the quantized weights made plain: what the
weights lost. Activations and the KV cache are not rounded here, as they are on the GPU.
"""

import hashlib
import json
import math
import random
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_trt.build.acceptance_probe import (
    MAX_SEQ_LEN,
    TOKENS,
    chat_prompts,
    decode,
    longest_sequence,
    write_engines,
)
from dflash_trt.chat import as_chat, load_encoding
from dflash_trt.checkpoints import Drafter, ModelSummary, Pair, Report, Target
from dflash_trt.config import Quantize
from dflash_trt.engines import read_info
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.machine import free_memory
from dflash_trt.prompts import read_prompts

if TYPE_CHECKING:
    from dflash_trt.decoding import LosslessReport
    from dflash_trt.engines.accuracy import Accuracy

FILE = "quantization.json"
TEXTS = 16  # pages of our own
HELD_OUT = 8  # a text in so many is not calibrated on
JUDGED = 512  # held-out tokens whose logits are compared, at most
NO_BLOCKS = "the drafter is a language model"
DRAWS, CONFIDENCE = 2000, 0.95  # of the prompts, with replacement
MEMORY = 3.0  # bytes in use for a byte of a model's weights in float32, at most


@dataclass(frozen=True)
class Texts:
    """Token ids: `calibrated` on, `held_out` to compare logits on, `prompts` to decode."""

    calibrated: list[list[int]]
    held_out: list[list[int]]
    prompts: list[list[int]]


@dataclass(frozen=True)
class Cost:
    """skipped: why nothing was measured, or why tau was not; "" otherwise.

    taus: tokens of a round, with the original and with the quantized target; rounds: of each.
    losses: the share of tau that is lost is between these, by a bootstrap over the prompts.
    """

    accuracy: "Accuracy | None" = None
    taus: tuple[float, float] | None = None
    rounds: tuple[int, int] | None = None
    losses: tuple[float, float] | None = None
    skipped: str = ""

    @property
    def loss(self) -> float:
        """The share of tau that is lost."""
        return 1 - self.taus[1] / self.taus[0] if self.taus else 0.0

    def __str__(self) -> str:
        said = []
        if (found := self.accuracy) is not None:
            said.append(
                f"greedy token equal at {found.agreement:.1%} of {found.tokens}, KL "
                f"{found.kl:.2g}, perplexity {found.perplexities[0]:.2f} -> "
                f"{found.perplexities[1]:.2f}"
            )
        if self.taus:
            change = f"{-self.loss:+.1%}"
            if self.losses:
                low, high = -self.losses[1], -self.losses[0]
                share = f"{100 * CONFIDENCE:.0f} %"
                change += f"; {low:+.1%} to {high:+.1%} in {share} of draws of the prompts"
            said.append(f"tau {self.taus[0]:.2f} -> {self.taus[1]:.2f} ({change})")
        return ", ".join([*said, *([self.skipped] if self.skipped else [])])


def calibration_texts(asked: Quantize, target: ModelSummary[Target]) -> Texts:
    """Of the file that the config names, or our own; its seed says which are held out.

    Raises RequestError for the file.
    """
    given, encode = asked.calibration, load_encoding(target.directory)
    choose, longest = random.Random(given.seed), target.number("max_position_embeddings")
    room = min(longest, MAX_SEQ_LEN) - min(TOKENS, longest // 2)
    if given.prompts is None:
        found = [encode(as_chat(page)) for page in _pages(choose)]
    else:
        vocab = target.number("vocab_size")
        found = read_prompts(given.prompts, encode, vocab_size=vocab, longest=room)
        choose.shuffle(found)
    if len(found) < 2:
        raise RequestError(
            f"{given.prompts} holds one prompt; some are to calibrate on, some to judge by",
            "Give two or more, better 32",
        )
    apart = -(-len(found) // HELD_OUT)
    held_out, cut = found[:apart], min(given.tokens, longest)
    return Texts(
        [ids[:cut] for ids in found[apart:]],
        [ids[: max(2, JUDGED // apart)] for ids in held_out[:JUDGED]],
        held_out if given.prompts else chat_prompts(target.directory, room),
    )


def _pages(choose: random.Random) -> list[str]:
    """Python's own documentation: prose and code that lie on every machine of ours."""
    from pydoc_data.topics import topics  # noqa: PLC0415

    pages = sorted(page for page in topics.values() if len(page) > 1000)
    return choose.sample(pages, TEXTS)


def provenance(texts: Texts) -> dict[str, Any]:
    """What beside checkpoint and config decides the quantized weights, for the manifest."""
    digest = hashlib.sha256(json.dumps(asdict(texts)).encode()).hexdigest()
    return {"texts": digest, "modelopt": version("nvidia-modelopt")}


def measure_cost(before: Pair, after: Pair, texts: Texts, scratch: Path, report: Report) -> Cost:
    """Compare a quantized target with its original; scratch: where engines are written meanwhile.

    Where our graphs or the memory cannot take them it is skipped, and says why.
    """
    # imported here: it loads the runtime
    from dflash_trt.engines.accuracy import compare, original_logits  # noqa: PLC0415

    original, quantized = before.target.model, after.target.model
    if original is None or quantized is None:
        refusal = before.target.refusal or after.target.refusal
        return Cost(skipped=f"not measured: our graphs refuse the target ({refusal})")
    if skipped := _too_large(original):
        return Cost(skipped=skipped)
    given, refusal = before.drafter.model, before.drafter.refusal
    drafter = given if isinstance(given, Drafter) else None
    why_not = f"our graphs refuse the drafter ({refusal})" if refusal else "there is no drafter"
    why_not = NO_BLOCKS if given else why_not
    length, decoded = longest_sequence(original, drafter), []
    engines = {name: scratch / name for name in ("original", "quantized")}
    try:
        for target, engine in zip((original, quantized), engines.values(), strict=True):
            write_engines(target, drafter, engine, length, report)
        expected = original_logits(engines["original"] / "target", texts.held_out)
        accuracy = compare(engines["quantized"] / "target", expected, texts.held_out)
        if drafter is None:
            return Cost(accuracy, skipped=f"tau not measured: {why_not}")
        for engine in engines.values():
            decoded.append(decode(engine, texts.prompts, min(TOKENS, length // 2), report))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _of_rounds(decoded[0], decoded[1], accuracy)


def measure_drafter(
    target: Target, drafter: Drafter | Target, engines: Path, scratch: Path, report: Report
) -> Cost:
    """Tau of built `engines` against that of the same pair in the checkpoints' precision."""
    if skipped := _too_large(target):
        return Cost(skipped=skipped)
    if isinstance(drafter, Target):
        return Cost(skipped=f"tau not measured: {NO_BLOCKS}")
    info = read_info(engines / "target", "onnxruntime")
    if info.ranks > 1:
        return Cost(skipped="tau not measured: the target is sharded")
    length = min(longest_sequence(target, drafter), info.max_seq_len)
    tokens = min(TOKENS, length // 2)
    prompts = chat_prompts(target.directory, length - tokens)
    try:
        write_engines(target, drafter, scratch, length, report)
        first, second = (decode(each, prompts, tokens, report) for each in (scratch, engines))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _of_rounds(first, second)


def _of_rounds(
    before: "LosslessReport", after: "LosslessReport", accuracy: "Accuracy | None" = None
) -> Cost:
    """What tau lost over the same prompts, and how far another choice of them might say else."""
    counted = [
        np.array([[len(text) - 1 for text in run.outputs], run.prompt_rounds], float)
        for run in (before, after)
    ]  # each [tokens after the first or rounds, prompt]
    prompts = len(before.outputs)
    drawn = np.random.default_rng(0).integers(prompts, size=(DRAWS, prompts))
    taus = [np.divide(*counts[:, drawn].sum(-1)) for counts in counted]
    low, high = np.quantile(1 - taus[1] / taus[0], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Cost(
        accuracy,
        (before.tau, after.tau),
        (before.rounds, after.rounds),
        (float(low), float(high)),
    )


def _too_large(target: Target) -> str:
    """Why a target is not run here in float32; "" if it is."""
    numbers = sum(math.prod(target.weights.shape(name)) for name in target.weights.names)
    needed, free = int(numbers * 4 * MEMORY), free_memory()
    if needed <= free:
        return ""
    return (
        f"not measured: in float32 the target may take {needed / 1e9:.0f} GB of memory, and "
        f"{free / 1e9:.0f} GB are free"
    )


def write_report(engine: Path, asked: Quantize, cost: Cost) -> None:
    """`quantization.json` in the engine's directory."""
    path = {"calibration": {"prompts"}}  # the build does not depend on it
    found = {"asked": asked.model_dump(mode="json", exclude=path), "cost": asdict(cost)}
    (engine / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def check_loss(cost: Cost, asked: Quantize) -> None:
    """BuildError where acceptance falls by more than the config allows, however prompts fell."""
    least = cost.losses[0] if cost.losses else cost.loss
    if least > asked.max_acceptance_loss:
        raise BuildError(
            f"with {asked.method} weights the drafter is accepted too rarely: {cost}; "
            f"engine.quantize.max_acceptance_loss is {asked.max_acceptance_loss:.1%}",
            "Take another method, calibrate on prompts of your own, or raise the limit",
        )
