"""Whether a drafter belongs to a target, and which engine kinds support the two.

`dflash-trt inspect` describes both, whether or not they run.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import model_checks
from dflash_trt.checkpoints.drafter import drafter_format, open_drafter
from dflash_trt.checkpoints.findings import (
    Check,
    Finding,
    NotKnown,
    checks_for,
    checks_of,
    run,
    warnings_of,
)
from dflash_trt.checkpoints.gguf import LINK
from dflash_trt.checkpoints.model import NO_DRAFTER, Drafter, Model, Pair, Target
from dflash_trt.checkpoints.spec import DecoderSpec, LayerSpec
from dflash_trt.checkpoints.target import open_target
from dflash_trt.checkpoints.weights import count_stored_types, open_files
from dflash_trt.errors import CheckpointError, PairError
from dflash_trt.planning import ModelSize, state_bytes, target_size

PAIR_CHECKS: list[Check[[Pair]]] = [
    check
    for check in checks_of(model_checks)
    if check not in (*model_checks.OF_EAGLE3, *model_checks.OF_TENSORRT_LLM)
]
TENSORRT_LLM_CHECKS: list[Check[[Pair]]] = model_checks.OF_TENSORRT_LLM
# checks of limits of our own reader
READER_CHECKS = ("target-tensors", "drafter-tensors")
# bytes per parameter; quantized ones have a float32 scale per 32 (graphs/quantized.py; the head,
# int8 even with int4, counts as the rest)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125, "int4": 0.625}
NOTES = {
    "pytorch": ["it was run on a CPU alone, its kernels in Triton's interpreter"],
    "tensorrt": ["its plans were built and checked, never run"],
}
NO_PLAN = "TensorRT has no LinearAttention (opset 27): a plugin for it is wanted"
RECURRENT = (
    "its recurrent layers verify chains of drafts: a tree would need a state for each branch"
)
CACHE_BYTES = {"float32": 4, "bfloat16": 2}
SIZES = "num_hidden_layers hidden_size num_attention_heads vocab_size max_position_embeddings"


def check_pair(
    target: Target,
    drafter: Drafter | None,
    draft_tokens: int | None,
    max_seq_len: int | None = None,
    other_checks: Sequence[Check[[Pair]]] = (),
) -> list[Finding]:
    """Return warnings, of a target alone too; PairError or CheckpointError if it cannot run."""
    pair = Pair(target, drafter or NO_DRAFTER, draft_tokens, max_seq_len)
    return warnings_of((check(pair) for check in _checks(pair, other_checks)), PairError)


def pair_findings(pair: Pair, other_checks: Sequence[Check[[Pair]]] = ()) -> Iterator[Finding]:
    return run(_checks(pair, other_checks), pair)


def _checks(pair: Pair, other_checks: Sequence[Check[[Pair]]]) -> list[Check[[Pair]]]:
    if pair.drafter.absent:
        return [*model_checks.OF_THE_TARGET, *other_checks]
    if pair.method == "eagle3":
        return [*model_checks.OF_THE_TARGET, *model_checks.OF_EAGLE3, *other_checks]
    return [*PAIR_CHECKS, *other_checks]


def engine_kinds(pair: Pair, own_findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return for each kind `kind`, `fits`, `reasons` against it, and `notes`."""
    models = (pair.target, pair.drafter)
    wrong = [each for each in own_findings if each.result == "error"]
    graphs = [f"{m.role}: {m.refusal.problem}" for m in models if m.refusal]
    graphs += [f"{each.name}: {each.found}" for each in wrong]
    # it reads tensors itself
    upstream = [f"{each.name}: {each.found}" for each in wrong if each.name not in READER_CHECKS]
    for model in models:
        if model.refusal and any(model.directory.glob("*.safetensors")):
            try:  # a bundle takes any complete file
                open_files(model.directory)
            except CheckpointError as error:
                upstream.append(f"{model.role}: {error.problem}")
    found = run(checks_for(TENSORRT_LLM_CHECKS, pair.method), pair)
    upstream += [each.found for each in found if each.result == "error"]
    hybrid = pair.target.read is not None and bool(pair.target.spec.delta_nets)
    plans = [*graphs, f"target: {NO_PLAN}"] if hybrid else graphs
    recurrent = {kind: [*NOTES.get(kind, []), RECURRENT] for kind in ("onnxruntime", "pytorch")}
    notes = NOTES | recurrent if hybrid else NOTES
    reasons = {
        "onnxruntime": graphs,
        "pytorch": graphs,
        "tensorrt": plans,
        "tensorrt_llm": upstream,
    }
    return [
        {"kind": kind, "fits": not why, "reasons": why, "notes": notes.get(kind, [])}
        for kind, why in reasons.items()
    ]


def inspect(
    target: Path, drafter: Path | None = None, other_checks: Sequence[Check[[Pair]]] = ()
) -> dict[str, Any]:
    """Return a report for JSON, None for the unreadable; CheckpointError without config.json."""
    pair = Pair(open_target(target), open_drafter(drafter) if drafter else NO_DRAFTER)
    tied = pair.target.values.get("tie_word_embeddings")
    tied = tied if isinstance(tied, bool) else None
    report = {"target": {**_describe(pair.target), "tie_word_embeddings": tied}}
    if drafter is not None:
        report["drafter"] = {**_describe(pair.drafter), **_describe_drafter(pair.drafter)}
    checks = list(pair_findings(pair, other_checks))
    kinds = engine_kinds(pair, checks)
    return {**report, "checks": [asdict(check) for check in checks], "engine_kinds": kinds}


def _describe(model: Model[Any]) -> dict[str, Any]:
    refusal, gguf, cached = model.refusal, model.directory / LINK, _numbers_per_token(model)
    size = _size(model)
    return {
        "directory": str(gguf.resolve() if gguf.is_file() else model.directory),
        "architecture": model.architecture,
        "family": model.values.get("model_type"),
        "refused": refusal and {"problem": refusal.problem, "fix": refusal.fix},
        **{name: model.number_or_none(name) for name in SIZES.split()},
        "layers": _count_layers(model),
        "weights": _describe_weights(model),
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
    return {"format": drafter_format(model.values), "taps": taps, **known}


def _count_layers(model: Model[Any]) -> list[str] | None:
    kinds = model.values.get("layer_types")
    if model.read:
        kinds = [_layer_kind(layer) for layer in model.layers]
    counted = Counter(map(str, kinds if isinstance(kinds, list) else ()))
    return [f"{count} x {kind}" for kind, count in counted.most_common(8)] or None


def _layer_kind(layer: LayerSpec) -> str:
    if layer.delta_net is not None:
        return "Gated DeltaNet"
    return f"window {layer.window}" if layer.window else "full attention"


def _describe_weights(model: Model[Any]) -> dict[str, Any] | None:
    found = model.stored.files if model.stored else model.directory.glob("model*")
    files = sorted(file for file in found if file.suffix in (".safetensors", ".gguf"))
    try:
        tensors = sum(map(count_stored_types, files), Counter[str]())
    except CheckpointError:
        return None
    size = sum(file.stat().st_size for file in files)
    return {"files": len(files), "bytes": size, "tensors": dict(tensors)}


def _memory(model: Model[Any]) -> dict[str, Any]:
    """Return the parameters and their bytes by dtype; int8 and int4 keep vectors float32."""
    if (weights := model.stored) is None:
        return {"parameters": None, "memory_bytes": None}
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
    return {"parameters": matrices + others, "memory_bytes": memory}


def _numbers_per_token(model: Model[Any]) -> int | None:
    """Return the numbers cached per token; with latent attention (MLA) the latent's."""
    if model.read is not None:
        spec: DecoderSpec = model.spec
        return sum(2 * x.num_key_value_heads * x.head_dim for x in spec.attention_layers)
    size = _size(model)
    return sum(layer.cached for layer in size.layers) if size else None


def _size(model: Model[Any]) -> ModelSize | None:
    """Return the sizes that config.json states, of refused models too."""
    try:
        return target_size({"vocab_size": 1, **model.values})
    except CheckpointError:
        return None
