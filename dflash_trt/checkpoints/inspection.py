"""`dflash-trt inspect`: what a target, a drafter and their pair are, whether or not they run."""

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.checkpoints.drafter import Drafter
from dflash_trt.checkpoints.gguf import LINK
from dflash_trt.checkpoints.pair import engine_kinds, pair_findings
from dflash_trt.checkpoints.spec import DecoderSpec
from dflash_trt.checkpoints.summary import (
    NO_DRAFTER,
    ModelSummary,
    Pair,
    summarize_drafter,
    summarize_target,
)
from dflash_trt.checkpoints.target import Target
from dflash_trt.checkpoints.weights import stored_types
from dflash_trt.errors import CheckpointError
from dflash_trt.planning import target_size

# bytes a parameter; the quantised ones with a float32 scale for each 32 (graphs/quantized.py; the
# head, int8 where the rest is int4, is counted as the rest)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125, "int4": 0.625}
CACHE_BYTES = {"float32": 4, "bfloat16": 2}
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)

Model = TypeVar("Model", Target, Drafter)


def inspect(target: Path, drafter: Path | None = None) -> dict[str, Any]:
    """The report, ready for JSON: `target`, `drafter`, `checks` of the two, `engine_kinds`.

    What cannot be read is None. CheckpointError only when there is no config.json to read.
    """
    pair = Pair(summarize_target(target), summarize_drafter(drafter) if drafter else NO_DRAFTER)
    report: dict[str, Any] = {"target": {**_describe(pair.target), **_target(pair.target)}}
    if drafter is not None:
        report["drafter"] = {**_describe(pair.drafter), **_drafter(pair.drafter)}
    checks = list(pair_findings(pair))
    report["checks"] = [asdict(check) for check in checks]
    report["engine_kinds"] = engine_kinds(pair, checks)
    return report


def _describe(model: ModelSummary[Model]) -> dict[str, Any]:
    refusal, loaded = model.refusal, model.model
    gguf = model.directory / LINK
    architectures = model.values.get("architectures")
    about: dict[str, Any] = {
        "directory": str(gguf.resolve() if gguf.is_file() else model.directory),
        "architecture": architectures[0]
        if isinstance(architectures, list) and architectures
        else None,
        "family": model.values.get("model_type"),
        "refused": refusal and {"problem": refusal.problem, "fix": refusal.fix},
    }
    for name in SIZES:
        about[name] = _known(model, name)
    spec = loaded.spec if loaded else None
    about["layers"] = _layers(spec) if spec else _layer_types(model)
    about["weights"] = _weights(model)
    about["parameters"], about["memory_bytes"] = _parameters(model)
    cached = _cached(model)
    about["kv_bytes_per_token"] = cached and {
        dtype: cached * size for dtype, size in CACHE_BYTES.items()
    }
    return about


def _target(model: ModelSummary[Target]) -> dict[str, Any]:
    tied = model.values.get("tie_word_embeddings")
    return {"tie_word_embeddings": tied if isinstance(tied, bool) else None}


def _drafter(model: ModelSummary[Drafter]) -> dict[str, Any]:
    try:
        taps = list(model.taps)
    except NotKnown:
        taps = None
    return {
        "format": "speculators" if "speculators_model_type" in model.values else "z-lab",
        "block_size": _known(model, "block_size"),
        "mask_token_id": _known(model, "mask_token_id"),
        "taps": taps,
        "draft_vocab_size": _known(model, "draft_vocab_size"),
        "num_target_layers": _known(model, "num_target_layers"),
    }


def _known(model: ModelSummary[Model], name: str) -> int | None:
    try:
        return model.number(name)
    except NotKnown:
        return None


def _layers(spec: DecoderSpec) -> list[str]:
    """Kinds of layers with how many there are of each."""
    kinds = Counter(
        f"window {layer.window}" if layer.window else "full attention" for layer in spec.layers
    )
    return [f"{count} x {kind}" for kind, count in kinds.items()]


def _layer_types(model: ModelSummary[Model]) -> list[str] | None:
    kinds = model.values.get("layer_types")
    if not isinstance(kinds, list):
        return None
    return [f"{count} x {kind}" for kind, count in Counter(map(str, kinds)).most_common(8)]


def _weights(model: ModelSummary[Model]) -> dict[str, Any] | None:
    """How many files of which size, and how many tensors of each dtype are stored in them."""
    found = model.weights.files if model.weights else model.directory.glob("model*")
    files = sorted(file for file in found if file.suffix in (".safetensors", ".gguf"))
    try:
        tensors = sum(map(stored_types, files), Counter[str]())
    except CheckpointError:
        return None
    return {
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "tensors": dict(tensors),
    }


def _parameters(model: ModelSummary[Model]) -> tuple[int | None, dict[str, int] | None]:
    """How many, and their bytes by dtype; int8 and int4 leave the embedding and vectors float32."""
    if (weights := model.weights) is None:
        return None, None
    matrices = others = 0
    for name in weights.names:
        shape = weights.shape(name)
        if len(shape) > 1 and not name.endswith("embed_tokens.weight"):
            matrices += math.prod(shape)
        else:
            others += math.prod(shape)
    memory = {
        dtype: int(matrices * size + others * (size if size >= 2 else BYTES["float32"]))
        for dtype, size in BYTES.items()
    }
    return matrices + others, memory


def _cached(model: ModelSummary[Model]) -> int | None:
    """Numbers that the KV caches hold for one token; a latent for latent attention (MLA)."""
    if model.model is not None:
        layers = model.model.spec.layers
        return sum(2 * layer.num_key_value_heads * layer.head_dim for layer in layers)
    try:
        return sum(layer.cached for layer in target_size({"vocab_size": 1, **model.values}).layers)
    except CheckpointError:
        return None
