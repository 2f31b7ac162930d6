"""From a config to a directory that can be served and verified without anything else.

For graphs and for a bundle there is a `prepare` that checks the pair and returns a `Job`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.builder import onnxruntime, tensorrt_llm
from dflash_trt.builder.manifest import CONFIG, MANIFEST, Manifest, build_digest, read_manifest
from dflash_trt.builder.opened import refuse_if_served, unserved
from dflash_trt.builder.provenance import (
    Job,
    Written,
    inputs_manifest,
    matching_manifest,
    write_bom,
    write_manifest,
)
from dflash_trt.checkpoints import Report, locate
from dflash_trt.checks import Finding
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.errors import BuildError
from dflash_trt.files import publish, sole_writer


@dataclass(frozen=True)
class BuildResult:
    directory: Path
    manifest: Manifest
    built: bool  # False: an identical build was there already
    seconds: float
    warnings: list[Finding]  # about the pair
    written: Written  # empty unless built

    @property
    def digest(self) -> str:
        return build_digest(self.directory)


def build(config: BuildConfig, output: Path, report: Report, text: str = "") -> BuildResult:
    """Check the pair and write engines, tokenizer, model repository and manifest to `output`.

    The directory appears complete or not at all, and replaces an older build that no server has
    open. text: the config as it was written, which is kept. Raises ConfigError, CheckpointError,
    PairError, or BuildError for the output.
    """
    started = time.monotonic()
    output = output.resolve()
    _check_replaceable(output)
    from_hub = isinstance(config.engine, TensorRTLLM) and config.engine.checkpoints == "hub"
    target = locate(config.target, "target", report, weights=not from_hub)
    drafter = locate(config.drafter, "drafter", report) if config.drafter else None
    has_graphs = config.engine_kind.graphs is not None
    prepare = onnxruntime.prepare if has_graphs else tensorrt_llm.prepare
    job = prepare(config, target, drafter, report)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(output) as scratch:
            _check_replaceable(output)  # again, now that no other process changes it
            inputs = inputs_manifest(job, text, report)
            manifest = matching_manifest(output, inputs, report)
            built = manifest is None
            written = Written()
            if manifest is None:
                refuse_if_served(output)
                written = job.write(scratch)
                if text:
                    (scratch / CONFIG).write_text(text, encoding="utf-8")
                write_bom(scratch, inputs, job)
                manifest = write_manifest(scratch, inputs, written, report)
                with unserved(output):
                    publish(scratch, output)
    except OSError as error:
        raise BuildError(
            f"cannot write {error.filename or output}: {error.strerror or error}",
            "Free the disk or give a writable --output; nothing was left half written",
        ) from error
    warnings = [*job.warnings, *written.warnings, *_unpinned(config, job)]
    return BuildResult(output, manifest, built, time.monotonic() - started, warnings, written)


def _unpinned(config: BuildConfig, job: Job) -> Iterator[Finding]:
    """Yield a warning for each source on the Hub whose revision may move."""
    for role, model in job.models.items():
        source = getattr(config, role)
        if model.at.commit is not None and source.revision != model.at.commit:
            what = f"{role} {source.hub} at {source.revision!r} is {model.at.commit} now"
            fix = f"To build the same again, write revision: {model.at.commit}"
            yield Finding("revision-pinned", "warning", what, fix)


def _check_replaceable(output: Path) -> None:
    if (output / MANIFEST).is_file():
        read_manifest(output)
    elif output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise BuildError(
            f"the output {output} exists and is not a build of dflash-trt",
            "Give another --output, or remove it yourself; it was left as it is",
        )
