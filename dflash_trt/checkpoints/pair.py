"""Whether a drafter belongs to a target, and which engine kinds support the two.

`dflash-trt inspect` describes both, whether or not they run.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import model_checks, upstream_checks
from dflash_trt.checkpoints.drafter import drafter_format, open_drafter
from dflash_trt.checkpoints.findings import Check, Finding, NotKnown, checks_for, checks_of, run
from dflash_trt.checkpoints.gguf import LINK
from dflash_trt.checkpoints.model import NO_DRAFTER, Drafter, Model, Pair, Target
from dflash_trt.checkpoints.spec import DecoderSpec
from dflash_trt.checkpoints.target import open_target
from dflash_trt.checkpoints.weights import open_files, stored_types
from dflash_trt.errors import CheckpointError, PairError
from dflash_trt.planning import target_size

TARGET_CHECKS: list[Check[[Pair]]] = model_checks.OF_THE_TARGET
PAIR_CHECKS: list[Check[[Pair]]] = checks_of(model_checks)
EAGLE3_CHECKS: list[Check[[Pair]]] = [*TARGET_CHECKS, *upstream_checks.OF_EAGLE3]
# requirements of TensorRT-LLM's workers
TENSORRT_LLM_CHECKS: list[Check[[Pair]]] = [
    check for check in checks_of(upstream_checks) if check not in upstream_checks.OF_EAGLE3
]
# checks of limits of our own reader
READER_CHECKS = ("target-tensors", "drafter-tensors")
# bytes per parameter; quantized ones have a float32 scale per 32 (graphs/quantized.py; the head,
# int8 even with int4, counts as the rest)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125, "int4": 0.625}
CACHE_BYTES = {"float32": 4, "bfloat16": 2}
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def check_pair(
    target: Target,
    drafter: Drafter | None,
    draft_tokens: int | None,
    max_seq_len: int | None = None,
    more: Sequence[Check[[Pair]]] = (),
) -> list[Finding]:
    """Return the warnings of a pair that can run, or of a target alone.

    draft_tokens, max_seq_len: from the build config, or None. more: checks of other rooms. Raises
    PairError for a wrong pair, CheckpointError for a missing tensor or an invalid tokenizer.
    """
    pair = Pair(target, drafter or NO_DRAFTER, draft_tokens, max_seq_len)
    warnings = []
    for check in _checks(pair, more):
        finding = check(pair)
        if finding.result == "error":
            raise PairError(finding.found, finding.fix)
        if finding.result == "warning":
            warnings.append(finding)
    return warnings


def pair_findings(pair: Pair, more: Sequence[Check[[Pair]]] = ()) -> Iterator[Finding]:
    """Yield all findings, without a drafter those of the target. more: checks of other rooms."""
    return run(_checks(pair, more), pair)


def _checks(pair: Pair, more: Sequence[Check[[Pair]]]) -> list[Check[[Pair]]]:
    """Return all checks of `build` and `inspect`."""
    checks = EAGLE3_CHECKS if pair.method == "eagle3" else PAIR_CHECKS
    return [*(TARGET_CHECKS if pair.drafter.absent else checks), *more]


def engine_kinds(pair: Pair, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return for each kind `kind`, `fits`, `reasons` against it, and `notes`.

    findings: of the pair's own checks.
    """
    models = (pair.target, pair.drafter)
    refused = [f"{m.role}: {m.refusal.problem}" for m in models if m.refusal]
    wrong = [each for each in findings if each.result == "error"]
    graphs = refused + [f"{each.name}: {each.found}" for each in wrong]
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
    return [
        _kind("onnxruntime", graphs, []),
        _kind("tensorrt", graphs, ["its plans were built and checked, never run"]),
        _kind("tensorrt_llm", upstream, []),
    ]


def _kind(kind: str, reasons: list[str], notes: list[str]) -> dict[str, Any]:
    return {"kind": kind, "fits": not reasons, "reasons": reasons, "notes": notes}


def inspect(
    target: Path,
    drafter: Path | None = None,
    more: Sequence[Check[[Pair]]] = (),
) -> dict[str, Any]:
    """Return a report for JSON: `target`, `drafter`, `checks` of the two, `engine_kinds`.

    more: checks of other rooms. Unreadable values are None. Raises CheckpointError only without a
    readable config.json.
    """
    pair = Pair(open_target(target), open_drafter(drafter) if drafter else NO_DRAFTER)
    report: dict[str, Any] = {"target": {**_describe(pair.target), **_target(pair.target)}}
    if drafter is not None:
        report["drafter"] = {**_describe(pair.drafter), **_drafter(pair.drafter)}
    checks = list(pair_findings(pair, more))
    report["checks"] = [asdict(check) for check in checks]
    report["engine_kinds"] = engine_kinds(pair, checks)
    return report


def _describe(model: Model[Any]) -> dict[str, Any]:
    refusal = model.refusal
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
    about["layers"] = _layers(model.spec) if model.read else _layer_types(model)
    about["weights"] = _weights(model)
    about["parameters"], about["memory_bytes"] = _parameters(model)
    cached = _cached(model)
    about["kv_bytes_per_token"] = cached and {
        dtype: cached * size for dtype, size in CACHE_BYTES.items()
    }
    return about


def _target(model: Target) -> dict[str, Any]:
    tied = model.values.get("tie_word_embeddings")
    return {"tie_word_embeddings": tied if isinstance(tied, bool) else None}


def _drafter(model: Drafter) -> dict[str, Any]:
    try:
        taps = list(model.taps)
    except NotKnown:
        taps = None
    return {
        "format": drafter_format(model.values),
        "block_size": _known(model, "block_size"),
        "mask_token_id": _known(model, "mask_token_id"),
        "taps": taps,
        "draft_vocab_size": _known(model, "draft_vocab_size"),
        "num_target_layers": _known(model, "num_target_layers"),
    }


def _known(model: Model[Any], name: str) -> int | None:
    try:
        return model.number(name)
    except NotKnown:
        return None


def _layers(spec: DecoderSpec) -> list[str]:
    """Return the kinds of layers and their counts."""
    kinds = Counter(
        f"window {layer.window}" if layer.window else "full attention" for layer in spec.layers
    )
    return [f"{count} x {kind}" for kind, count in kinds.items()]


def _layer_types(model: Model[Any]) -> list[str] | None:
    kinds = model.values.get("layer_types")
    if not isinstance(kinds, list):
        return None
    return [f"{count} x {kind}" for kind, count in Counter(map(str, kinds)).most_common(8)]


def _weights(model: Model[Any]) -> dict[str, Any] | None:
    """Return number and size of weight files, and counts of stored tensors by dtype."""
    found = model.stored.files if model.stored else model.directory.glob("model*")
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


def _parameters(model: Model[Any]) -> tuple[int | None, dict[str, int] | None]:
    """Return the parameters and their bytes by dtype; int8 and int4 keep vectors float32."""
    if (weights := model.stored) is None:
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


def _cached(model: Model[Any]) -> int | None:
    """Return the numbers cached per token; with latent attention (MLA) the latent's."""
    if model.read is not None:
        return sum(2 * layer.num_key_value_heads * layer.head_dim for layer in model.layers)
    try:
        return sum(layer.cached for layer in target_size({"vocab_size": 1, **model.values}).layers)
    except CheckpointError:
        return None
