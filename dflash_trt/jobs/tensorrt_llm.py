"""Builds of kind `tensorrt_llm`: a bundle for TensorRT-LLM, which runs the rounds itself."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.kinds import engine_kinds
from dflash_trt.checkpoints.outline import Outline, Pair, outline_drafter, outline_target
from dflash_trt.checkpoints.pair import Finding, findings
from dflash_trt.checkpoints.source import Located, Report
from dflash_trt.checkpoints.tokenizer import copy_tokenizer, tokenizer_files
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.engines.tensorrt_llm.args import LlmArgs, check_args, choose_args
from dflash_trt.engines.tensorrt_llm.bundle import checkpoint_files, write_bundle
from dflash_trt.engines.tensorrt_llm.info import KIND
from dflash_trt.errors import ConfigError, PairError
from dflash_trt.hardware import machine
from dflash_trt.jobs.job import Input, Job
from dflash_trt.serving.repository import write_llm_repository

UNPROVED = "Compare its acceptance length with the published one: `dflash-trt doctor`"
INSPECT = "Run `dflash-trt inspect` where the weights are"


def prepare(config: BuildConfig, target_at: Located, drafter_at: Located, report: Report) -> Job:
    """What the graphs refuse may pass: TensorRT-LLM reads the models itself.

    Raises ConfigError, CheckpointError or PairError.
    """
    section = config.engine
    assert isinstance(section, TensorRTLLM)
    by_id = section.checkpoints == "hub"
    if by_id:
        if target_at.commit is None:
            raise ConfigError(
                "engine.checkpoints is 'hub', but the target is a directory",
                "Give target.hub and target.revision, or engine.checkpoints: copy",
            )
        pinned = config.target.model_copy(update={"revision": target_at.commit})
        config = config.model_copy(update={"target": pinned})
    pair = Pair(
        outline_target(target_at.directory),
        outline_drafter(drafter_at.directory),
        config.speculation.draft_tokens,
        config.serving.max_seq_len,
    )
    target_files = checkpoint_files(pair.target, weights=not by_id)
    tokenizer_files(pair.target.directory)  # raises where there is none
    drafter_files = checkpoint_files(pair.drafter)
    warnings = _fitting(pair, by_id)
    args = choose_args(config, pair, machine(section.hardware))
    for finding in check_args(config, pair, machine(section.hardware), args):
        if finding.result == "error":
            raise ConfigError(f"{finding.name}: {finding.found}", finding.fix)
        if finding.result == "warning":
            warnings.append(finding)
    return Job(
        config,
        Input(target_at, target_files, _known(pair.target)),
        Input(drafter_at, drafter_files, _known(pair.drafter)),
        warnings,
        partial(_write, config=config, pair=pair, args=args, report=report),
    )


def _fitting(pair: Pair, by_id: bool) -> list[Finding]:
    """The warnings of a pair that TensorRT-LLM can run; PairError for another."""
    checks = list(findings(pair))
    (kind,) = (each for each in engine_kinds(pair, checks) if each["kind"] == KIND)
    if kind["reasons"]:
        errors = [check for check in checks if check.result == "error"]
        fixes = {f"{check.name}: {check.found}": check.fix for check in errors}
        first = kind["reasons"][0]
        raise PairError(first, fixes.get(first, "Use a pair that TensorRT-LLM runs with DFlash"))
    warnings = [check for check in checks if check.result == "warning"]
    warnings += [Finding("tensorrt-llm", "warning", note, UNPROVED) for note in kind["notes"]]
    if by_id:
        left = ", ".join(check.name for check in checks if check.result == "not checked")
        found = f"the target's weights stay on the Hub, which leaves unchecked: {left}"
        warnings.append(Finding("weights-not-read", "warning", found, INSPECT))
    return warnings


def _known(model: Outline[Any]) -> dict[str, Any]:
    """What the graphs would take; of a model that they refuse its config.json."""
    return asdict(model.model.spec) if model.model else dict(model.values)


def _write(
    directory: Path, *, config: BuildConfig, pair: Pair, args: LlmArgs, report: Report
) -> None:
    write_bundle(directory, config, pair, args, report)
    copy_tokenizer(pair.target.directory, directory)
    write_llm_repository(directory, config, pair)
