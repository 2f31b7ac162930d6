"""`dflash-trt doctor`: named checks of whether this machine can run a build, with fixes.

Run it on the machine with the GPUs, before serving.
"""

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.build import Depth, read_manifest
from dflash_trt.checkpoints.findings import Finding, run
from dflash_trt.doctor.generation_checks import acceptance, generation, greedy_texts
from dflash_trt.doctor.machine_checks import ANY_KIND, OF_BUNDLE, Patient
from dflash_trt.tensorrt_llm import KIND


def examine(
    directory: Path, generate: bool | None, depth: Depth | None = None
) -> Iterator[Finding]:
    """Yield each finding.

    generate: whether to let TensorRT-LLM decode a few prompts; None: if there was no error before.
    depth: of checking files, see `manifest.check_build`. Raises BuildError if `directory` is no
    build.
    """
    patient, wrong = Patient(directory.resolve(), read_manifest(directory), depth), False
    bundle = patient.kind == KIND
    for finding in run((*ANY_KIND, *(OF_BUNDLE if bundle else ())), patient):
        wrong |= finding.result == "error"
        yield finding
    if bundle and generate is not False:
        if generate or not wrong:
            yield from run((generation, acceptance, greedy_texts), patient)
        else:
            fix = "Fix them, or give --generate"
            yield Finding(generation.name, "not checked", "there were errors before", fix)
