"""`dflash-trt doctor`: named checks of whether this machine can run a build, with fixes.

Run it on the machine with the GPUs, before serving.
"""

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.builder import check_build, read_manifest
from dflash_trt.checks import Finding, run
from dflash_trt.doctor import checks
from dflash_trt.tensorrt_llm import KIND


def examine(directory: Path, *, generate: bool) -> Iterator[Finding]:
    """Yield each finding; raise BuildError if `directory` is not as it was built.

    generate: whether to let TensorRT-LLM decode a few prompts, if there was no error before.
    """
    check_build(directory)
    patient, wrong = checks.Patient(directory.resolve()), False
    bundle = read_manifest(directory)["config"]["engine"]["kind"] == KIND
    for finding in run((*checks.ANY_KIND, *(checks.OF_BUNDLE if bundle else ())), patient):
        wrong |= finding.result == "error"
        yield finding
    if bundle and generate and wrong:
        yield Finding(checks.generation.name, "not checked", "there were errors before", "Fix them")
    elif bundle and generate:
        yield from run((checks.generation, checks.acceptance, checks.greedy_texts), patient)
