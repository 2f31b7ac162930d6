"""Builds of kind `tensorrt_llm`: a bundle for TensorRT-LLM, which runs the rounds itself."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_trt.builder.acceptance_probe import calibration_texts, measure_cost, quantization_inputs
from dflash_trt.builder.deployment import write_deployment
from dflash_trt.builder.provenance import Input, Job, Written
from dflash_trt.builder.repository import write_llm_repository
from dflash_trt.chat import CHAT_CHECKS
from dflash_trt.checkpoints import (
    NO_DRAFTER,
    Located,
    Model,
    Pair,
    Report,
    copy_tokenizer,
    open_drafter,
    open_target,
    tokenizer_files,
    tokenizer_split,
)
from dflash_trt.checks import READER_CHECKS, Finding, pair_findings, warnings_of
from dflash_trt.config import BuildConfig, Precision
from dflash_trt.errors import ConfigError, PairError
from dflash_trt.tensorrt_llm import (
    KIND,
    Context,
    LlmArgs,
    as_if_quantized,
    check_args,
    check_quantizable,
    checkpoint_files,
    choose_args,
    drafter_name,
    quantize_target,
    write_bundle,
)


def prepare(
    config: BuildConfig, target_at: Located, drafter_at: Located | None, report: Report
) -> Job:
    """Check a pair, even one that graphs refuse; raises ConfigError, CheckpointError, PairError."""
    section = config.llm
    by_id = section.checkpoints == "hub"
    precision = section.quantize
    config = config.model_copy(update={"target": config.target.pinned(target_at.commit)})
    pair = open_pair(config, target_at, drafter_at)
    target_files = checkpoint_files(pair.target, weights=not by_id)
    target_files = sorted({*target_files, *tokenizer_files(pair.target.directory)})
    drafter = None
    if drafter_at is not None:
        known = {"name": drafter_name(config), **_known_fields(pair.drafter)}
        drafter = Input(drafter_at, checkpoint_files(pair.drafter), known)
    warnings = _pair_warnings(pair)
    # by id: the same bytes, whether or not the weights are local
    known = dict(pair.target.values) if by_id else _known_fields(pair.target)
    known |= tokenizer_split(pair.target.directory)
    if precision is not None:
        check_quantizable(precision, pair.target, section.machine)
    # fail before minutes of quantizing; the result is checked again
    context = Context(config, replace(pair, target=as_if_quantized(precision, pair.target)))
    args, of_args = _checked_args(context)
    if precision is not None:
        texts = calibration_texts(section.calibration, pair.target)
        known["quantized"] = quantization_inputs(texts)
        write = partial(_quantize, precision, config, pair, texts, report)
    else:
        warnings += of_args
        write = partial(_write, context, args, report)
    return Job(config, Input(target_at, target_files, known), drafter, warnings, write)


def open_pair(config: BuildConfig, target: Located, drafter: Located | None) -> Pair:
    return Pair(
        open_target(target.directory),
        open_drafter(drafter.directory) if drafter else NO_DRAFTER,
        config.speculation.draft_tokens,
        config.serving.max_seq_len,
        config.speculation.method,
    )


def _known_fields(model: Model[Any]) -> dict[str, Any]:
    """Return a model's spec, or its config.json if the graphs refuse it."""
    return asdict(model.spec) if model.read else dict(model.values)


def _pair_warnings(pair: Pair) -> list[Finding]:
    findings = pair_findings(pair, CHAT_CHECKS)
    others = (finding for finding in findings if finding.name not in READER_CHECKS)
    return warnings_of(others, PairError)


def _checked_args(context: Context) -> tuple[LlmArgs, list[Finding]]:
    args = choose_args(context)
    return args, warnings_of(check_args(context, args), ConfigError)


def _quantize(
    precision: Precision,
    config: BuildConfig,
    pair: Pair,
    texts: list[list[int]],
    report: Report,
    directory: Path,
) -> Written:
    """Write a bundle whose target is quantized now; its arguments are chosen for that."""
    quantized = directory / "engines" / KIND / "target"
    quantize_target(precision, pair.target.directory, quantized, texts, report)
    context = Context(config, replace(pair, target=open_target(quantized)))
    _pair_warnings(context.pair)  # the original's were reported already
    cost = measure_cost(pair, context.pair, directory / "measured", report)
    args, warnings = _checked_args(context)
    _write(context, args, report, directory)
    return Written(cost=cost, warnings=warnings)


def _write(context: Context, args: LlmArgs, report: Report, directory: Path) -> Written:
    write_bundle(directory, context, args, report)
    copy_tokenizer(context.target.directory, directory)
    write_llm_repository(directory, context.config, context.pair)
    write_deployment(directory, context.config, args.tensor_parallel_size)
    return Written()
