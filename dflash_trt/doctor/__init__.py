"""`dflash-trt doctor`: can this machine run this build? Each check is named and says what to do.

Run it on the machine with the GPUs, before anything is served there.
"""

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.build import Depth, read_manifest
from dflash_trt.checkpoints.checks import Check, Finding, run
from dflash_trt.doctor import decoding, gpus, place, runtime
from dflash_trt.doctor.patient import Patient
from dflash_trt.tensorrt_llm import KIND

Checks = tuple[Check[[Patient]], ...]
ANY_KIND: Checks = (place.files, place.shared_memory, place.triton, place.ports)
OF_BUNDLE: Checks = (
    gpus.driver,
    gpus.gpu_count,
    gpus.gpu_model,
    gpus.gpu_memory,
    gpus.nvlink,
    runtime.tensorrt_llm,
    runtime.arguments_taken,
    runtime.faults_known,
    runtime.drafter_attention,
    place.launcher,
)
OF_DECODING: Checks = (
    decoding.generation,
    decoding.acceptance_under_load,
    decoding.acceptance_by_kind,
    decoding.greedy_texts,
)


def examine(
    directory: Path, generate: bool | None, depth: Depth | None = None
) -> Iterator[Finding]:
    """Each check as it is made.

    generate: whether to let TensorRT-LLM decode a few prompts; None: if nothing is wrong before.
    depth: how files are checked, see `manifest.check_build`.
    Raises BuildError when `directory` is no build.
    """
    patient, wrong = Patient(directory.resolve(), read_manifest(directory), depth), False
    bundle = patient.kind == KIND
    for finding in run((*ANY_KIND, *(OF_BUNDLE if bundle else ())), patient):
        wrong |= finding.result == "error"
        yield finding
    if bundle and generate is not False:
        if generate or not wrong:
            yield from run(OF_DECODING, patient)
        else:
            skipped = "errors stand before it", "Mend them, or give --generate"
            yield Finding(decoding.generation.name, "not checked", *skipped)
