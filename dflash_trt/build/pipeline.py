"""Building a config: a directory that can be served and verified without anything else.

Each engine kind has a `prepare` (`PREPARE`) that checks the pair and returns a `Job`.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from dflash_trt.build import onnxruntime, tensorrt_llm
from dflash_trt.build.manifest import MANIFEST, SIGNATURE, Manifest, read_manifest
from dflash_trt.build.provenance import (
    Job,
    Written,
    inputs_manifest,
    matching_manifest,
    write_bom,
    write_manifest,
)
from dflash_trt.build.signing import verify_signature
from dflash_trt.checkpoints import Located, Report, locate
from dflash_trt.checkpoints.findings import Finding
from dflash_trt.config import BuildConfig, Source, TensorRTLLM
from dflash_trt.errors import BuildError
from dflash_trt.files import publish, sole_writer

PREPARE: dict[str, Callable[[BuildConfig, Located, Located | None, Report], Job]] = {
    "onnxruntime": onnxruntime.prepare,
    "tensorrt": onnxruntime.prepare,
    "tensorrt_llm": tensorrt_llm.prepare,
}


@dataclass(frozen=True)
class BuildResult:
    directory: Path
    manifest: Manifest
    built: bool  # False: an identical build was there already
    seconds: float
    warnings: list[Finding]  # about the pair
    written: Written  # empty unless built


def build(config: BuildConfig, output: Path, report: Report) -> BuildResult:
    """Check the pair and write engines, tokenizer, model repository and manifest to `output`.

    The directory appears complete or not at all, and replaces an older build. Raises ConfigError,
    CheckpointError, PairError, or BuildError for the output.
    """
    started = time.monotonic()
    output = output.resolve()
    _check_output(output)
    job = _prepare(config, report)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(output) as scratch:
            _check_output(output)  # again, now that no other process changes it
            inputs = _beside(lambda: inputs_manifest(job, report))
            manifest = None
            if (output / MANIFEST).is_file():
                manifest = matching_manifest(output, inputs.result(), report)
            built, written = manifest is None, Written()
            if manifest is None:
                written = job.write(scratch)
                write_bom(scratch, inputs.result(), job)
                manifest = write_manifest(scratch, inputs.result(), written, job, report)
                publish(scratch, output)
    except OSError as error:
        raise BuildError(
            f"cannot write {error.filename or output}: {error.strerror or error}",
            "Free the disk or give a writable --output; nothing was left half written",
        ) from error
    warnings = [*job.warnings, *written.warnings]
    return BuildResult(output, manifest, built, time.monotonic() - started, warnings, written)


def _beside(make: Callable[[], Manifest]) -> "Future[Manifest]":
    """Run `make` in a daemon thread, for which a failing build does not wait."""
    made: Future[Manifest] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    return made


def _prepare(config: BuildConfig, report: Report) -> Job:
    """Locate both models and check them."""
    engine = config.engine
    by_id = isinstance(engine, TensorRTLLM) and engine.checkpoints == "hub"
    target = locate(config.target, "target", report, weights=not by_id)
    unchecked, drafter = _check_signature("target", config.target, target), None
    if config.drafter:
        drafter = locate(config.drafter, "drafter", report)
        unchecked += _check_signature("drafter", config.drafter, drafter)
    job = PREPARE[engine.kind](config, target, drafter, report)
    return replace(job, warnings=[*job.warnings, *unchecked])


def _check_signature(role: str, source: Source, at: Located) -> list[Finding]:
    """Raise BuildError unless signed as configured; warn of a signature nobody checks."""
    if source.signed_by is not None:
        verify_signature(at.directory, source.signed_by)
    elif (at.directory / SIGNATURE).is_file():
        found = f"the {role} has a signature ({SIGNATURE}) that nobody checked"
        fix = f"Name its signer's public key as {role}.signed_by"
        return [Finding("signature-not-checked", "warning", found, fix)]
    return []


def _check_output(output: Path) -> None:
    """Raise BuildError unless `output` is missing, empty or a build of ours."""
    if (output / MANIFEST).is_file():
        read_manifest(output)
    elif output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise BuildError(
            f"the output {output} exists and is not a build of dflash-trt",
            "Give another --output, or remove it yourself; it was left as it is",
        )
