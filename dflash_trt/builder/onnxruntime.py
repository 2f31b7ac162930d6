"""Builds of kinds `onnxruntime`, `pytorch` and `tensorrt`: graphs of both models, or plans."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

from dflash_trt.builder.deployment import write_deployment
from dflash_trt.builder.provenance import Input, Job, Written
from dflash_trt.builder.repository import write_repository
from dflash_trt.chat import CHAT_CHECKS
from dflash_trt.checkpoints import (
    CARD,
    Drafter,
    DrafterSpec,
    Located,
    Report,
    Target,
    TargetSpec,
    copy_tokenizer,
    drafter_shapes,
    for_length,
    load_drafter,
    load_target,
    target_shapes,
    tokenizer_files,
    tokenizer_split,
)
from dflash_trt.checks import NO_PLAN, Finding, check_pair
from dflash_trt.config import BuildConfig, OnnxRuntime, PyTorch, TensorRT
from dflash_trt.errors import ConfigError

DEFAULT_MAX_SEQ_LEN = 4096
BITS: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
STORED = "stored"  # quantize: as the GGUF file is


def prepare(
    config: BuildConfig, target_at: Located, drafter_at: Located | None, report: Report
) -> Job:
    """Check a pair or a target alone; raises ConfigError, CheckpointError or PairError."""
    target = load_target(target_at.directory)
    drafter = load_drafter(drafter_at.directory) if drafter_at else None
    spec = drafter.spec if drafter else None
    warnings = check_pair(
        target,
        drafter,
        config.speculation.draft_tokens,
        config.serving.max_seq_len,
        CHAT_CHECKS,
    )
    config = _with_defaults(config, target.spec, spec)
    if target.spec.delta_nets:
        _check_kind_of_hybrid(config)
    if isinstance(config.engine, OnnxRuntime):
        quantize = _quantization(config.engine, target)
        warnings += _dequantized(target, quantize)
        engine = config.engine.model_copy(update={"quantize": quantize})
        config = config.model_copy(update={"engine": engine})
    length = config.serving.max_seq_len or 0
    target = for_length(target, length)
    target_files = [*_input_files(target), *tokenizer_files(target.directory)]
    known = asdict(target.spec) | tokenizer_split(target.directory)
    of_target = Input(target_at, target_files, known)
    of_drafter = None
    if drafter_at and drafter:
        drafter = for_length(drafter, length)
        of_drafter = Input(drafter_at, _input_files(drafter), asdict(drafter.spec))
    write = partial(_write, config, target, drafter, report)
    return Job(config, of_target, of_drafter, warnings, write)


def _check_kind_of_hybrid(config: BuildConfig) -> None:
    """Raise ConfigError for a kind that has no kernel for recurrent layers."""
    if isinstance(config.engine, TensorRT):
        raise ConfigError(
            f"the target has Gated DeltaNet layers, and {NO_PLAN}",
            "Use engine kind pytorch or tensorrt_llm on a GPU, or onnxruntime on a CPU",
        )


def _quantization(engine: OnnxRuntime, target: Target) -> str | None:
    """Return `quantize` as configured, or `stored` for a quantized GGUF file; None: unset."""
    if engine.quantize is None:
        return STORED if target.weights.has_blocks else None
    if engine.quantize == STORED and not target.weights.has_blocks:
        raise ConfigError(
            f"engine.quantize is {STORED}, but {target.directory} is no quantized GGUF file",
            "Use int8, int4 or none, or leave it out",
        )
    return engine.quantize


def _dequantized(target: Target, quantize: str | None) -> Iterator[Finding]:
    """Yield a warning for each quantized type of a GGUF file that becomes float32."""
    if quantize != STORED:
        return
    for kind, sizes in target.weights.block_sizes().items():
        if not sizes.kept:
            what = f"{sizes.tensors} tensors are of type {kind}, whose blocks no graph keeps: "
            what += f"{sizes.bytes / 1e6:,.0f} MB become {sizes.build_bytes / 1e6:,.0f} MB"
            fix = "To save memory, take a file in K-quants, IQ4 or Q8_0, or write quantize: int4"
            yield Finding("blocks-kept", "warning", what, fix)


def _input_files(model: Target | Drafter) -> list[Path]:
    card = model.directory / CARD
    files = [model.directory / "config.json", *model.weights.files]
    return [*files, card] if card.is_file() else files


def _with_defaults(
    config: BuildConfig, target: TargetSpec, drafter: DrafterSpec | None
) -> BuildConfig:
    """Fill in max_seq_len and other defaults; without a drafter rounds run in process."""
    longest = target.max_position_embeddings
    length = config.serving.max_seq_len
    if length is None:
        length = min(longest, DEFAULT_MAX_SEQ_LEN)
        if drafter:
            length = min(length, drafter.max_position_embeddings)
    block_size = drafter.block_size if drafter else 1
    if not block_size < length <= longest:
        raise ConfigError(
            f"serving.max_seq_len is {length}, but this pair takes {block_size + 1} to "
            f"{longest} (block size to the longest text that the target knows)",
            "Correct it, or leave it out",
        )
    update: dict[str, object] = {
        "max_seq_len": length,
        "prefix_cache": config.serving.prefix_cache_mib,
    }
    if drafter is None:
        update["mode"] = "in_process"
    return config.model_copy(update={"serving": config.serving.model_copy(update=update)})


def _write(
    config: BuildConfig,
    target: Target,
    drafter: Drafter | None,
    report: Report,
    directory: Path,
) -> Written:
    # imported here: it takes most of the time of a build without work
    from dflash_trt.builder.engines import EngineOptions, build_drafter, build_target  # noqa: PLC0415
    from dflash_trt.graphs import Storage  # noqa: PLC0415

    engine = config.engine
    serving = config.serving
    engines = directory / "engines"
    assert isinstance(engine, OnnxRuntime | PyTorch | TensorRT)
    plans = engine if isinstance(engine, TensorRT) else None
    options = EngineOptions(slots=serving.slots, max_seq_len=serving.max_seq_len or 0, threads=1)
    if isinstance(engine, OnnxRuntime):
        quantize = engine.quantize or "none"
        storage = Storage(BITS.get(quantize), keep_blocks=quantize != "none")
        options = replace(options, threads=engine.threads, storage=storage)
    if isinstance(engine, PyTorch):
        storage = Storage(fp8=engine.quantize == "fp8", keep_fp8=True)
        options = replace(options, dtype=engine.dtype, storage=storage)
    if plans:
        from dflash_trt.engines.tensorrt.plan import build_plans, capabilities  # noqa: PLC0415

        capabilities(plans)  # fails now if something is not installed
    count = _Counter("building the target engine", len(target_shapes(target.spec)), report)
    spec = drafter.spec if drafter else None
    of_target = replace(options, progress=count, kind=engine.kind)
    digests = build_target(target, spec, engines / "target", of_target)
    if drafter is not None:
        tensors = len(drafter_shapes(drafter.spec)) + 2  # 2: shared tables
        count = _Counter("building the drafter engine", tensors, report)
        storage = replace(options.storage, int8_inputs=True)
        if storage.keep_blocks:
            storage = replace(storage, bits=8)
        of_drafter = replace(options, progress=count, kind=engine.kind, storage=storage)
        digests |= build_drafter(drafter, target, engines / "drafter", of_drafter)
    if plans:
        build_plans(engines, plans, serving.prefill_chunk, report)
    copy_tokenizer(target.directory, directory)
    write_repository(directory, config, target.spec, spec.block_size if spec else 1)
    write_deployment(directory, config)
    return Written(digests)


class _Counter:
    """Converts an engine's tensor names ("a|b": fused tensors a and b) to counts."""

    def __init__(self, step: str, total: int, report: Report) -> None:
        self._done = 0
        self._total = total
        self._report = partial(report, step)
        self._report(0, total)

    def __call__(self, name: str) -> None:
        self._done = min(self._done + name.count("|") + 1, self._total)
        self._report(self._done, self._total)
