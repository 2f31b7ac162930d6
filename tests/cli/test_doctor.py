"""`dflash-trt doctor`, on this machine and on ones that a fake `nvidia-smi` makes of it.

`nvidia-smi` prints what its man page and published logs show: CSV of `--query-gpu`. TensorRT-LLM is
the stand-in of `standins/`.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.doctor import checks, examine
from dflash_trt.machine import container_cpus
from dflash_trt.planning import lowest_believed
from dflash_trt.tensorrt_llm.bundle import read_info
from dflash_trt.tensorrt_llm.first_generation import Measured
from dflash_trt.tensorrt_llm.host import gpus, judged_arguments
from tests.support.builds import config_of, quiet
from tests.support.commands import run
from tests.support.llm_build import STANDINS
from tests.support.pairs import make_pair, teach

MACHINES = {  # name, compute capability, MiB as the driver shows them
    "dgx-b300": ("NVIDIA B300 SXM6 AC", "10.3", 275040),
    "hgx-h200": ("NVIDIA H200", "9.0", 143771),
}


def query(kind: str = "dgx-b300", count: int = 8, used: Mapping[int, int] | None = None) -> str:
    name, capability, total = MACHINES[kind]
    free = [total - (used or {}).get(i, 0) for i in range(count)]
    row = f"{name}, {capability}, {total}"
    return "".join(f"{i}, GPU-0000000{i}, {row}, {free[i]}, 580.95.05\n" for i in range(count))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return `machine(**changes)`, which changes what `nvidia-smi` prints."""
    folder = tmp_path / "driver"
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "--query-gpu=index,uuid,name,compute_cap,memory.total,memory.free,driver_version)"
        f' cat "{folder}/query" ;;\n'
        '*) echo "Invalid option" >&2; exit 2 ;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(**changes: Any) -> None:
        (folder / "query").write_text(query(**changes))

    make()
    return make


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a TensorRT-LLM importable, here and in child processes."""
    package = tmp_path / "site" / "tensorrt_llm"
    (package / "llmapi").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.4.0rc1'")
    (package / "llmapi" / "llm_args.py").write_text(
        "class TorchLlmArgs:\n    def __init__(self, **given): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STANDINS))
    monkeypatch.setenv("PYTHONPATH", str(STANDINS))


def make_build(directory: Path, drafter: str = "drafter", **engine: object) -> Path:
    section = {"kind": "tensorrt_llm", "gpus": 4, "concurrency": 2, **engine}
    output = directory / "-".join(["built", *map(str, engine.values())])
    drafters = {"path": directory / drafter}
    build(config_of(directory, drafter=drafters, engine=section), output, quiet)
    return output


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    make_pair(directory, tied=False, rope_theta=10000.0)
    return directory


@pytest.fixture(scope="module")
def built(pair: Path) -> Path:
    return make_build(pair)


def results(directory: Path) -> dict[str, str]:
    return {finding.name: finding.result for finding in examine(directory, generate=False)}


def bad(directory: Path) -> dict[str, str]:
    return {n: r for n, r in results(directory).items() if r in ("error", "warning")}


def test_a_machine_without_anything_is_told_what_it_lacks(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = run("doctor", built)
    assert code == 1
    assert "Traceback" not in out + err
    assert "0 GPUs (none), and the build takes 4" in out
    assert "TensorRT-LLM is not installed" in out
    code, out, _ = run("doctor", built, "--json")
    found = json.loads(out)
    checks = {check["name"]: check for check in found["checks"]}
    assert (code, found["healthy"]) == (1, False)
    assert checks["generation"]["result"] == "not checked"
    for name in ("gpu-count", "tensorrt-llm"):
        assert checks[name]["result"] == "error"
        assert checks[name]["fix"]


@pytest.mark.usefixtures("installed", "machine")
def test_a_machine_that_fits_is_well(built: Path) -> None:
    assert bad(built) == {}
    names = results(built)
    assert [name for name, result in names.items() if result == "not checked"] == []
    assert {"gpu-model", "gpu-memory", "tensorrt-llm"} <= {*names}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "finds"),
    [
        ({"count": 3}, {"gpu-count": "error"}),
        ({"used": {2: 40_000}}, {"gpu-memory": "warning"}),
        ({"used": {6: 40_000}}, {}),  # not one of the four that it takes
        ({"kind": "hgx-h200"}, {"gpu-model": "warning", "gpu-memory": "warning"}),
    ],
)
def test_what_is_wrong_with_the_gpus_is_found(
    built: Path, machine: Callable[..., None], changes: dict[str, Any], finds: dict[str, str]
) -> None:
    machine(**changes)
    assert bad(built) == finds


@pytest.mark.usefixtures("installed")
def test_only_gpus_that_cuda_may_use_count(
    built: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-00000005,7")
    assert [gpu.index for gpu in gpus()] == [0, 5, 7]
    assert bad(built) == {"gpu-count": "error"}


@pytest.mark.models
@pytest.mark.usefixtures("decoding", "machine")
def test_tensorrt_llm_judges_the_arguments_itself(pair: Path, tmp_path: Path) -> None:
    """The stand-in's `TorchLlmArgs` refuses here what our schema lets through."""
    engine = Path(shutil.copytree(make_build(pair), tmp_path / "b", symlinks=True)) / "engines"
    engine = engine / "tensorrt_llm"
    assert judged_arguments(engine) == ("1.4.0rc1", [])
    with (engine / "llm_args.yaml").open("a") as file:
        file.write("max_batchsize: 3\n")
    _, [said] = judged_arguments(engine)
    assert "extra inputs are not permitted: max_batchsize" in said
    found = checks.tensorrt_llm(checks.Patient(tmp_path / "b"))
    assert found.result == "error"
    assert found.found.endswith(said)


@pytest.mark.usefixtures("installed", "machine")
def test_another_release_judges_itself(built: Path, tmp_path: Path) -> None:
    package = tmp_path / "site" / "tensorrt_llm"
    for text, result, says in (
        ("__version__ = '1.4.0rc2'", "warning", "TensorRT-LLM 1.4.0rc2; the build is for 1.4.0rc1"),
        ("raise ImportError('libcuda.so.1')", "error", "cannot be imported: ImportError: libcuda"),
    ):
        (package / "__init__.py").write_text(text)
        (found,) = (each for each in examine(built, generate=False) if each.name == "tensorrt-llm")
        assert found.result == result
        assert says in found.found
        assert "tensorrt-llm==1.4.0rc1" in found.fix


@pytest.mark.usefixtures("installed", "machine")
def test_little_shared_memory_is_an_error(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda path: docker)
    assert bad(built) == {"shared-memory": "error"}


@pytest.mark.usefixtures("installed", "machine")
def test_a_bound_process_is_told(built: Path) -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        (found,) = (each for each in examine(built, generate=False) if each.name == "cpu-binding")
    finally:
        os.sched_setaffinity(0, cpus)
    assert found.result == "warning"
    assert found.found == f"this process may use 1 of {container_cpus()} CPUs"
    assert "srun --cpu-bind=none" in found.fix


@pytest.mark.models
@pytest.mark.usefixtures("decoding", "machine")
def test_a_drafter_that_is_not_the_published_one_is_found_out(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path / "target")
    shutil.copytree(pair / "drafter", tmp_path / "gpt-oss-20b-DFlash")
    build_dir = make_build(tmp_path, "gpt-oss-20b-DFlash")
    assert read_info(build_dir / "engines" / "tensorrt_llm").lowest == 2.78
    (found,) = (each for each in examine(build_dir, generate=True) if each.name == "generation")
    assert found.result in ("warning", "error")  # around what is no acceptance at all
    assert "of 6 prompts" in found.found
    assert float(found.found.partition("one at a time ")[2][:4]) < 2


@pytest.mark.usefixtures("decoding", "machine")
def test_a_generation_that_fails_names_its_log(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(shutil.copytree(STANDINS, tmp_path / "broken")) / "tensorrt_llm"
    text = "def __init__(self, **args):\n        raise RuntimeError('CUDA error: out of memory')"
    (package / "llm.py").write_text(f"class LLM:\n    {text}\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (found,) = (each for each in examine(built, generate=True) if each.name == "generation")
    assert found.found == "TensorRT-LLM ended: RuntimeError: CUDA error: out of memory"
    assert "Traceback" in Path(found.fix.removeprefix("Read its log: ")).read_text()


@pytest.mark.models
@pytest.mark.usefixtures("decoding", "machine")
def test_under_load_texts_stay_and_drafts_are_accepted(tmp_path: Path) -> None:
    teach(make_pair(tmp_path, tied=False))
    (tmp_path / "drafter").rename(tmp_path / "elsewhere")
    build_dir = make_build(tmp_path, "elsewhere", concurrency=8)
    found = {each.name: each for each in examine(build_dir, generate=True)}
    told = found["acceptance"].found
    assert re.match(r"tokens a round: 8 at once \d\.\d\d", told)
    assert re.search(r"\blong prompt \d\.\d\d", told), told
    assert found["generation"].result == found["greedy-texts"].result == "passed"
    assert found["greedy-texts"].found == "64 of 64 greedy texts are plain decoding's"


@pytest.mark.parametrize(
    ("drafts", "ok"), [((7, 7, 7), True), ((7, 8, 7), True), ((8, 9, 7), False)]
)
def test_how_texts_are_compared(drafts: tuple[int, ...], ok: bool) -> None:
    def texts(*last: int) -> Measured:
        return Measured("64 at once", [[5, 6, token] for token in last])

    seen = checks.compare_texts(texts(*drafts), texts(7, 7, 7))
    assert seen.ok == ok
    assert seen.what.startswith(f"{drafts.count(7)} of 3 greedy texts")


@pytest.mark.parametrize(
    ("length", "lowest", "result"),
    [
        (4.2, 2.96, "passed"),
        (3.0, 2.96, "passed"),
        (2.5, 2.96, "warning"),
        (1.1, 2.96, "error"),
        (2.5, 0.0, "passed"),
        (1.1, 0.0, "error"),
        (None, 0.0, "warning"),
    ],
)
def test_how_an_acceptance_length_is_judged(
    built: Path, length: float | None, lowest: float, result: str
) -> None:
    info = read_info(built / "engines" / "tensorrt_llm")
    info = replace(info, lowest=lowest, lowest_by="a card")
    seen = checks.judge_acceptance([Measured("x", acceptance_length=length)], info)
    assert result == ("passed" if seen.ok else seen.severity or "error")
    assert ("at least 2.96 is believed (a card)" in seen.what) == bool(lowest and (length or 0) > 2)
    failed = checks.judge_acceptance([Measured("JSON", error="RequestError: no")], info)
    assert (failed.ok, failed.severity) == (False, None)
    assert "JSON RequestError: no" in failed.what


def test_what_is_believed_at_least_is_the_engines_own_figure() -> None:
    """TensorRT-LLM's own test has four drafts; for fewer another engine's figure counts."""
    least, by = lowest_believed("z-lab/gpt-oss-20b-DFlash", 7, "TensorRT-LLM")
    assert least == 2.78
    assert "TensorRT-LLM's accuracy references" in by
    assert "4 draft tokens, GSM8K" in by
    least, by = lowest_believed("gpt-oss-120b-DFlash", 9, "TensorRT-LLM")
    assert least == pytest.approx(0.8 * 3.7)
    assert "SGLang" in by
    assert lowest_believed("gpt-oss-20b-DFlash", 3, "TensorRT-LLM") == (0.0, "")
    assert lowest_believed("drafter", 7, "TensorRT-LLM") == (0.0, "")


def test_other_kinds_have_the_checks_that_concern_them(pair: Path) -> None:
    build(config_of(pair), pair / "graphs", quiet)
    assert list(results(pair / "graphs")) == ["shared-memory", "cpu-binding", "triton"]


def test_serve_and_verify_say_in_a_sentence_what_is_missing(
    built: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(count=2)
    code, _, err = run("serve", built)
    assert code == 1
    assert "lacks TensorRT-LLM 1.4.0rc1 and 4 NVIDIA GPUs (it has 2)" in err
    assert len(err.splitlines()) == 1
    monkeypatch.syspath_prepend(str(STANDINS))
    _, _, err = run("serve", built)
    assert "lacks 4 NVIDIA GPUs (it has 2)" in err
    code, _, err = run("verify", built, "--prompts", "p.jsonl", "--max-tokens", 4)
    assert code == 1
    assert "runs in TensorRT-LLM" in err
    assert f"dflash-trt doctor {built}" in err
