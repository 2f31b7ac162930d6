"""What quantized weights cost in tau, the tokens of a round, measured in temporary engines.

Measured on this CPU by our own graphs with dequantized float32 weights, it covers the weights only:
activations and the KV cache are not rounded here, as they are on the GPU.
"""

import hashlib
import json
import math
import random
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_trt.chat import as_chat, load_encoding
from dflash_trt.checkpoints import Drafter, Pair, Report, Target
from dflash_trt.config import Speculation
from dflash_trt.machine import free_memory
from dflash_trt.prompts import read_prompts

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
# of the default calibration texts
PAGES = 14
PAGE_TOKENS = 256
MEMORY = 3.0  # largest memory per byte of a model's float32 weights


def chat_prompts(directory: Path, longest: int) -> list[list[int]]:
    encode = load_encoding(directory)
    prompts = [encode(as_chat(text))[:longest] for text in PROMPTS]
    return [ids for ids in prompts if ids]


@dataclass(frozen=True)
class Cost:
    taus: tuple[float, float] | None = None  # with the original and the quantized weights
    skipped: str = ""  # why nothing was measured

    def __str__(self) -> str:
        if self.taus is None:
            return f"not measured: {self.skipped}"
        before, after = self.taus
        return f"tau {before:.2f} -> {after:.2f} ({after / before - 1:+.1%})"


def calibration_texts(prompts: Path | None, target: Target) -> list[list[int]]:
    """Return token ids of a file's prompts, or of default texts; RequestError for the file."""
    encode = load_encoding(target.directory)
    longest = target.number("max_position_embeddings")
    if prompts is not None:
        vocab = target.number("vocab_size")
        return read_prompts(prompts, encode, vocab_size=vocab, longest=longest)
    # Python's own documentation: prose and code installed everywhere
    from pydoc_data.topics import topics  # noqa: PLC0415

    pages = sorted(page for page in topics.values() if len(page) > 1000)
    cut = min(PAGE_TOKENS, longest)
    return [encode(as_chat(page))[:cut] for page in random.Random(0).sample(pages, PAGES)]


def quantization_inputs(texts: list[list[int]]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return {"texts": digest, "modelopt": version("nvidia-modelopt")}


def measure_cost(before: Pair, after: Pair, scratch: Path, report: Report) -> Cost:
    """Compare a quantized target with its original, or say why our graphs or memory cannot."""
    original = before.target
    quantized = after.target
    drafter = before.drafter
    refusal = original.refusal or quantized.refusal
    if refusal:
        return Cost(skipped=f"our graphs refuse the target ({refusal})")
    if drafter.absent:
        return Cost(skipped="there is no drafter")
    if drafter.refusal:
        return Cost(skipped=f"our graphs refuse the drafter ({drafter.refusal})")
    numbers = sum(math.prod(original.weights.shape(name)) for name in original.weights.names)
    needed = int(numbers * 4 * MEMORY)
    free = free_memory()
    if needed > free:
        problem = f"in float32 it may take {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"
        return Cost(skipped=problem)
    try:
        tau = _tau(original, drafter, scratch, report)
        return Cost((tau, _tau(quantized, drafter, scratch, report)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tau(target: Target, drafter: Drafter, engines: Path, report: Report) -> float:
    """Return tau over `PROMPTS`, greedy, with whole blocks, in engines of one sequence."""
    # imported here: these load the graph builder and the runtime
    from dflash_trt.builder.engines import EngineOptions, build_drafter, build_target  # noqa: PLC0415
    from dflash_trt.decoding import check_lossless  # noqa: PLC0415

    length = min(
        target.spec.max_position_embeddings,
        drafter.spec.max_position_embeddings,
        MAX_SEQ_LEN,
    )
    tokens = min(TOKENS, length // 2)
    options = EngineOptions(slots=1, max_seq_len=length)
    shutil.rmtree(engines, ignore_errors=True)
    report("building engines", 0, 2)
    build_target(target, drafter.spec, engines / "target", options)
    report("building engines", 1, 2)
    build_drafter(drafter, target, engines / "drafter", options)
    report("building engines", 2, 2)
    prompts = chat_prompts(target.directory, length - tokens)
    whole_blocks = Speculation(policy="fixed")
    result = check_lossless(
        engines,
        prompts,
        tokens,
        whole_blocks,
        lambda done: report("prompts", done, len(prompts)),
    )
    return result.tau
