"""Builds of kind `tensorrt_llm`: a bundle for TensorRT-LLM, which runs the rounds itself."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_trt.build.acceptance_probe import calibration_texts, measure_cost, provenance
from dflash_trt.build.deployment import write_deployment
from dflash_trt.build.provenance import Input, Job, Written
from dflash_trt.build.repository import write_llm_repository
from dflash_trt.chat import CHAT_CHECKS
from dflash_trt.checkpoints import (
    NO_DRAFTER,
    READER_CHECKS,
    Located,
    Model,
    Pair,
    Report,
    copy_tokenizer,
    open_drafter,
    open_target,
    pair_findings,
    tokenizer_files,
)
from dflash_trt.checkpoints.findings import warnings_of
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.errors import ConfigError, PairError
from dflash_trt.planning import machine
from dflash_trt.tensorrt_llm import (
    KIND,
    LlmArgs,
    announced,
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
    """Check a pair for TensorRT-LLM, which may run what the graphs refuse.

    Raises ConfigError, CheckpointError or PairError.
    """
    section = config.engine
    assert isinstance(section, TensorRTLLM)
    by_id = section.checkpoints == "hub"
    config = config.model_copy(update={"target": config.target.pinned(target_at.commit)})
    pair = summarize(config, target_at, drafter_at)
    target_files = checkpoint_files(pair.target, weights=not by_id)
    tokenizer_files(pair.target.directory)  # raises if there is none
    drafter = None
    if drafter_at is not None:
        known = {"name": drafter_name(config), **_known(pair.drafter)}
        drafter = Input(drafter_at, checkpoint_files(pair.drafter), known)
    hardware = machine(section.hardware)
    found = pair_findings(pair, CHAT_CHECKS)
    checks = [check for check in found if check.name not in READER_CHECKS]
    warnings = warnings_of(checks, PairError)
    # by id: the same bytes, whether or not the weights are local
    known = dict(pair.target.values) if by_id else _known(pair.target)
    asked = section.quantize
    if asked is not None:
        check_quantizable(asked, pair.target, hardware)
    # fail before minutes of quantizing; the result is checked again
    planned = replace(pair, target=announced(asked, pair.target))
    args = choose_args(config, planned, hardware)
    of_args = warnings_of(check_args(config, planned, hardware, args), ConfigError)
    if asked is not None:
        texts = calibration_texts(section.calibration, pair.target)
        known |= {"quantized": provenance(texts)}
        write = partial(_quantize, config=config, pair=pair, texts=texts, report=report)
    else:
        warnings += of_args
        write = partial(_write, config=config, pair=pair, args=args, report=report)
    return Job(config, Input(target_at, target_files, known), drafter, warnings, write)


def summarize(config: BuildConfig, target: Located, drafter: Located | None) -> Pair:
    """Return both models as far as readable, and the config's requirements."""
    return Pair(
        open_target(target.directory),
        open_drafter(drafter.directory) if drafter else NO_DRAFTER,
        config.speculation.draft_tokens,
        config.serving.max_seq_len,
        config.speculation.method,
    )


def _known(model: Model[Any]) -> dict[str, Any]:
    """Return a model's spec, or its config.json if the graphs refuse it."""
    return asdict(model.spec) if model.read else dict(model.values)


def _quantize(
    directory: Path, *, config: BuildConfig, pair: Pair, texts: list[list[int]], report: Report
) -> Written:
    """Write a bundle whose target is quantized now; its arguments are chosen for that."""
    section = config.engine
    assert isinstance(section, TensorRTLLM)
    assert section.quantize is not None
    engine, hardware = directory / "engines" / KIND, machine(section.hardware)
    quantize_target(section.quantize, pair.target.directory, engine / "target", texts, report)
    made = replace(pair, target=open_target(engine / "target"))
    checks = [check for check in pair_findings(made) if check.name not in READER_CHECKS]
    warnings_of(checks, PairError)  # the original's warnings were reported already
    cost = measure_cost(pair, made, directory / "measured", report)
    args = choose_args(config, made, hardware)
    warnings = warnings_of(check_args(config, made, hardware, args), ConfigError)
    _write(directory, config=config, pair=made, args=args, report=report)
    return Written(cost=cost, warnings=warnings)


def _write(
    directory: Path, *, config: BuildConfig, pair: Pair, args: LlmArgs, report: Report
) -> Written:
    write_bundle(directory, config, pair, args, report)
    copy_tokenizer(pair.target.directory, directory)
    write_llm_repository(directory, config, pair)
    assert isinstance(config.engine, TensorRTLLM)
    write_deployment(directory, config, args.tensor_parallel_size)
    return Written()
