"""`dflash-trt doctor`: named checks of whether this machine can run a build, with fixes.

Run it on the machine with the GPUs, before serving.
"""

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.builder import check_build, read_manifest
from dflash_trt.checks import Finding, run
from dflash_trt.doctor import checks, one_gpu
from dflash_trt.tensorrt_llm import KIND


def examine(directory: Path, *, generate: bool) -> Iterator[Finding]:
    """Yield each finding; raise BuildError if `directory` is not as it was built.

    generate: whether to let TensorRT-LLM decode a few prompts, if there was no error before.
    """
    check_build(directory)
    patient = checks.Patient(directory.resolve())
    wrong = False
    kind = read_manifest(directory)["config"]["engine"]["kind"]
    of_kind = {KIND: checks.OF_BUNDLE, "pytorch": one_gpu.OF_PYTORCH}.get(kind, ())
    for finding in run((*checks.ANY_KIND, *of_kind), patient):
        wrong |= finding.result == "error"
        yield finding
    if kind != KIND or not generate:
        return
    if wrong:
        yield Finding(checks.generation.name, "not checked", "there were errors before", "Fix them")
        return
    yield from run(checks.OF_DECODING, patient)
