"""`dflash-trt doctor`: can this machine run this build? Each check is named and says what to do.

Run it on the machine with the GPUs, before anything is served there.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_trt.build import Depth, read_manifest
from dflash_trt.checkpoints.checks import Finding
from dflash_trt.doctor import gpus, place, runtime
from dflash_trt.doctor.patient import Patient, Seen
from dflash_trt.errors import DflashError
from dflash_trt.tensorrt_llm import KIND

Look = Callable[[Patient], Seen]
ANY_KIND: tuple[Look, ...] = (place.files, place.shared_memory, place.triton, place.ports)
OF_BUNDLE: tuple[Look, ...] = (
    gpus.driver,
    gpus.gpu_count,
    gpus.gpu_model,
    gpus.gpu_memory,
    gpus.nvlink,
    runtime.tensorrt_llm,
    runtime.drafter_attention,
    place.hub_target,
    place.launcher,
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
    for look in (*ANY_KIND, *(OF_BUNDLE if bundle else ())):
        finding = _finding(look, patient)
        wrong |= finding.result == "error"
        yield finding
    if bundle and generate is not False:
        asked = generate or not wrong
        skipped = Seen("not checked", "errors stand before it", "Mend them, or give --generate")
        yield _finding(runtime.generation, patient) if asked else Finding("generation", *skipped)


def _finding(look: Look, patient: Patient) -> Finding:
    name = look.__name__.replace("_", "-")
    try:
        return Finding(name, *look(patient))
    except DflashError as error:
        return Finding(name, "error", error.problem, error.fix)
