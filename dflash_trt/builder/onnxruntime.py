"""Builds of kinds `onnxruntime`, `pytorch` and `tensorrt`: graphs of both models, or plans."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

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
from dflash_trt.checks import Finding, check_pair
from dflash_trt.config import BuildConfig, GraphEngine
from dflash_trt.engine_kinds import GraphKind, graph_facts
from dflash_trt.engines import module_of
from dflash_trt.errors import ConfigError

DEFAULT_MAX_SEQ_LEN = 4096


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
    assert isinstance(config.engine, GraphEngine)
    if target.spec.delta_nets:
        _check_kind_of_hybrid(config.engine.kind)
    engine = config.engine.for_checkpoint(target.directory, has_blocks=target.weights.has_blocks)
    if engine.keeps_all_blocks:
        warnings += _dequantized(target)
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


def _check_kind_of_hybrid(kind: GraphKind) -> None:
    """Raise ConfigError for a kind that has no kernel for recurrent layers."""
    why_not = graph_facts(kind).why_no_recurrence
    if why_not is not None:
        raise ConfigError(
            f"the target has Gated DeltaNet layers, and {why_not}",
            "Use engine kind pytorch or tensorrt_llm on a GPU, or onnxruntime on a CPU",
        )


def _dequantized(target: Target) -> Iterator[Finding]:
    """Yield a warning for each quantized type of a GGUF file that becomes float32."""
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

    engine = config.engine
    serving = config.serving
    engines = directory / "engines"
    assert isinstance(engine, GraphEngine)
    given = engine.options
    options = EngineOptions(
        slots=serving.slots,
        max_seq_len=serving.max_seq_len or 0,
        threads=given.threads,
        storage=given.storage,
        kind=engine.kind,
        dtype=given.dtype,
    )
    name = graph_facts(engine.kind).compiler
    compiler = None if name is None else module_of(name)
    if compiler is not None:
        compiler.capabilities(engine)  # fails now if something is not installed
    count = _Counter("building the target engine", len(target_shapes(target.spec)), report)
    spec = drafter.spec if drafter else None
    of_target = replace(options, progress=count)
    digests = build_target(target, spec, engines / "target", of_target)
    if drafter is not None:
        tensors = len(drafter_shapes(drafter.spec)) + 2  # 2: shared tables
        count = _Counter("building the drafter engine", tensors, report)
        storage = replace(options.storage, int8_inputs=True)
        if storage.keep_blocks:
            storage = replace(storage, bits=8)
        of_drafter = replace(options, progress=count, storage=storage)
        digests |= build_drafter(drafter, target, engines / "drafter", of_drafter)
    if compiler is not None:
        compiler.compile_graphs(engines, engine, serving.prefill_chunk, report)
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
