"""Accuracy of quantized weights: a target's logits compared with its unquantized engine's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.engines.info import EngineInfo, read_info
from dflash_trt.engines.onnxruntime import KIND, load_session
from dflash_trt.errors import EngineError

TEXTS = (
    "The river rises in the hills north of the town, turns a mill and reaches the sea a day on.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n",
    "Q: A train leaves at 9:40 and takes 75 minutes. When does it arrive?\nA: 9:40 plus 1 hour is",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "friends": [{"name":',
)
TOKENS = 64  # limit per text
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Accuracy:
    """Errors of all next-token logits over `tokens` tokens of text, teacher-forced.

    agreement: fraction of positions with the same greedy token; rms: root mean square of the error
    over that of the logits; largest: the largest error of a logit.
    """

    tokens: int
    agreement: float
    rms: float
    largest: float


def original_logits(original: Path, texts: Sequence[Sequence[int]]) -> Floats:
    """Return logits of the unquantized engine, for `compare`.

    Runs unoptimized: weights are unpacked one at a time, so peak memory is the largest weight in
    float32 (the head, twice), not the model.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    info = read_info(original, KIND)
    return teacher_forced(load_session(original, info, options), info, texts)


def compare(quantized: Path, expected: Floats, texts: Sequence[Sequence[int]]) -> Accuracy:
    """Run an engine over token ids; expected: `original_logits` of the same.

    Raises EngineError if ONNX Runtime would unpack quantized weights in every step.
    """
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(quantized / "profile")
    info = read_info(quantized, KIND)
    session = load_session(quantized, info, options)
    found = teacher_forced(session, info, texts)
    _check_fused(Path(session.end_profiling()), quantized)
    error = found - expected
    return Accuracy(
        tokens=len(found),
        agreement=float(np.mean(found.argmax(-1) == expected.argmax(-1))),
        rms=float(np.sqrt(np.mean(error**2) / np.mean(expected**2))),
        largest=float(np.abs(error).max()),
    )


def teacher_forced(
    session: ort.InferenceSession, info: EngineInfo, texts: Sequence[Sequence[int]]
) -> Floats:
    """Return logits, float32 `[tokens of all texts, vocab]`."""
    found = []
    for text in texts:
        n = len(text)
        inputs = {
            "tokens": np.array([text], np.int64),
            "positions": np.arange(n)[None],
            "write_index": np.zeros(1, np.int64),
            "mask": np.tri(n, dtype=bool)[None, None],
            "head_rows": np.arange(n),
        }
        for layer, (heads, head_dim) in enumerate(info.caches):
            for part in ("key", "value"):
                shape = (1, heads, info.cache_len, head_dim)
                inputs[f"{part}_{layer}"] = np.zeros(shape, np.float32)
        found.append(session.run(["logits"], inputs)[0])
    return np.concatenate(found)


def _check_fused(profile: Path, engine: Path) -> None:
    """Raise EngineError unless DequantizeLinear and MatMul are fused; unfused is far slower."""
    events = json.loads(profile.read_text())
    profile.unlink()
    for event in events:
        if event.get("args", {}).get("op_name") == "DequantizeLinear":
            raise EngineError(
                f"ONNX Runtime does not run node {event['name']} of {engine} on packed weights",
                "Build without `quantize`",
            )
