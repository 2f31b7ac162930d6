"""`dflash-trt inspect`: a description of both models, whether or not they run."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.drafter import drafter_format, open_drafter
from dflash_trt.checkpoints.model import NO_DRAFTER, Drafter, Model, NotKnown, Pair
from dflash_trt.checkpoints.spec import DecoderSpec, LayerSpec
from dflash_trt.checkpoints.target import open_target
from dflash_trt.checks.findings import Check
from dflash_trt.checks.fit import engine_kinds, pair_findings
from dflash_trt.errors import CheckpointError
from dflash_trt.planning import ModelSize, state_bytes, target_size
from dflash_trt.weights.gguf import LINK
from dflash_trt.weights.weights import count_stored_types

# bytes per parameter; quantized ones have a float32 scale per 32 (graphs/quantized.py; the head,
# int8 even with int4, counts as the rest)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125, "int4": 0.625}
CACHE_BYTES = {"float32": 4, "bfloat16": 2}
SIZES = "num_hidden_layers hidden_size num_attention_heads vocab_size max_position_embeddings"


def inspect(
    target: Path, drafter: Path | None = None, other_checks: Sequence[Check[[Pair]]] = ()
) -> dict[str, Any]:
    """Return a report for JSON, None for the unreadable; CheckpointError without config.json."""
    pair = Pair(open_target(target), open_drafter(drafter) if drafter else NO_DRAFTER)
    tied = pair.target.values.get("tie_word_embeddings")
    if not isinstance(tied, bool):
        tied = None
    report = {"target": {**_describe(pair.target), "tie_word_embeddings": tied}}
    if drafter is not None:
        report["drafter"] = {**_describe(pair.drafter), **_describe_drafter(pair.drafter)}
    checks = list(pair_findings(pair, other_checks))
    kinds = engine_kinds(pair, checks)
    return {**report, "checks": [asdict(check) for check in checks], "engine_kinds": kinds}


def _describe(model: Model[Any]) -> dict[str, Any]:
    refusal = model.refusal
    cached = _numbers_per_token(model)
    size = _size(model)
    place = model.directory
    gguf = model.directory / LINK
    if gguf.is_file():
        place = gguf.resolve()
    return {
        "directory": str(place),
        "architecture": model.architecture,
        "family": model.values.get("model_type"),
        "refused": refusal and {"problem": refusal.problem, "fix": refusal.fix},
        **{name: model.number_or_none(name) for name in SIZES.split()},
        "layers": _count_layers(model),
        "weights": _describe_weights(model),
        "blocks": _describe_blocks(model),
        **_memory(model),
        "kv_bytes_per_token": cached and {name: cached * n for name, n in CACHE_BYTES.items()},
        "state_bytes": size and state_bytes(size),
    }


def _describe_drafter(model: Drafter) -> dict[str, Any]:
    try:
        taps = list(model.taps)
    except NotKnown:
        taps = None
    fields = ("block_size", "mask_token_id", "draft_vocab_size", "num_target_layers")
    known = {name: model.number_or_none(name) for name in fields}
    return {"format": drafter_format(model), "taps": taps, **known}


def _count_layers(model: Model[Any]) -> list[str] | None:
    kinds = model.values.get("layer_types")
    if model.read:
        kinds = [_layer_kind(layer) for layer in model.layers]
    if not isinstance(kinds, list) or not kinds:
        return None
    counted = Counter(map(str, kinds))
    return [f"{count} x {kind}" for kind, count in counted.most_common(8)]


def _layer_kind(layer: LayerSpec) -> str:
    if layer.delta_net is not None:
        return "Gated DeltaNet"
    return f"window {layer.window}" if layer.window else "full attention"


def _describe_weights(model: Model[Any]) -> dict[str, Any] | None:
    candidates = model.stored.files if model.stored else model.directory.glob("model*")
    files = sorted(file for file in candidates if file.suffix in (".safetensors", ".gguf"))
    try:
        tensors = sum(map(count_stored_types, files), Counter[str]())
    except CheckpointError:
        return None
    size = sum(file.stat().st_size for file in files)
    return {"files": len(files), "bytes": size, "tensors": dict(tensors)}


def _describe_blocks(model: Model[Any]) -> dict[str, Any] | None:
    """Return by type what the blocks of a GGUF file take, there and in a build that keeps them."""
    sizes = model.stored.block_sizes() if model.stored else {}
    return {kind: size._asdict() for kind, size in sizes.items()} or None


def _memory(model: Model[Any]) -> dict[str, Any]:
    """Return the parameters and their bytes by dtype; int8 and int4 keep vectors float32."""
    weights = model.stored
    if weights is None:
        return {"parameters": None, "memory_bytes": None}
    matrices = 0
    others = 0
    for name in weights.names:
        shape = weights.shape(name)
        if len(shape) > 1 and not name.endswith("embed_tokens.weight"):
            matrices += math.prod(shape)
        else:
            others += math.prod(shape)
    memory = {}
    for dtype, size in BYTES.items():
        size_of_others = size if size >= 2 else BYTES["float32"]
        memory[dtype] = int(matrices * size + others * size_of_others)
    if weights.has_blocks:
        memory["stored"] = weights.kept_bytes()
    return {"parameters": matrices + others, "memory_bytes": memory}


def _numbers_per_token(model: Model[Any]) -> int | None:
    """Return the numbers cached per token; with latent attention (MLA) the latent's."""
    if model.read is not None:
        spec: DecoderSpec = model.spec
        return sum(
            2 * layer.num_key_value_heads * layer.head_dim for layer in spec.attention_layers
        )
    size = _size(model)
    if size is None:
        return None
    return sum(layer.cached for layer in size.layers)


def _size(model: Model[Any]) -> ModelSize | None:
    """Return the sizes that config.json states, of refused models too."""
    try:
        return target_size({"vocab_size": 1, **model.values})
    except CheckpointError:
        return None
