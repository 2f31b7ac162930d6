"""`dflash-trt doctor`, on this machine and on ones that a fake `nvidia-smi` makes of it.

`nvidia-smi` prints what its man page and published logs show: CSV of `--query-gpu`, and the matrix
of `topo -m` with its underlined header. TensorRT-LLM is the stand-in of `standins/`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from builds import config_of, quiet
from commands import run
from dflash_trt.tensorrt_llm.hub_cache import with_cached_target
from llm_build import STANDINS
from pairs import make_pair, teach

from dflash_trt.build.run import build
from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.doctor import decoding as decoding_checks
from dflash_trt.doctor import examine, place
from dflash_trt.errors import ConfigError, EngineError
from dflash_trt.roofline import lowest_believed
from dflash_trt.serving.ports import Ports
from dflash_trt.tensorrt_llm.first_generation import Measured
from dflash_trt.tensorrt_llm.host import check_host, gpus, not_on_nvlink
from dflash_trt.tensorrt_llm.info import read_info, write_info
from dflash_trt.tensorrt_llm.judgement import refused_arguments

MACHINES = {  # name, compute capability, MiB as the driver shows them
    "dgx-b300": ("NVIDIA B300 SXM6 AC", "10.3", 275040),
    "hgx-h200": ("NVIDIA H200", "9.0", 143771),
}


@dataclass(frozen=True)
class Machine:
    """What `nvidia-smi` says of a machine."""

    name: str = "dgx-b300"
    count: int = 8
    driver: str = "580.95.05"
    used: dict[int, int] = field(default_factory=dict)  # MiB by GPU
    apart: tuple[int, int] | None = None  # two GPUs without NVLink

    def query(self) -> str:
        name, capability, total = MACHINES[self.name]
        return "".join(
            f"{i}, GPU-0000000{i}, {name}, {capability}, {total}, "
            f"{total - self.used.get(i, 0)}, {self.driver}\n"
            for i in range(self.count)
        )

    def topology(self) -> str:
        names = [f"GPU{i}" for i in range(self.count)]
        head = "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
        text = f"\t\x1b[4m{head}\x1b[0m\n"
        for i, name in enumerate(names):
            cells = [self._link(i, j) for j in range(self.count)]
            text += "\t".join([name, *cells, "PIX", "0-55", "0", "N/A"]) + "\n"
        return text + "NIC0\tPIX\n\nLegend:\n\n  X    = Self\n"

    def _link(self, one: int, other: int) -> str:
        if one == other:
            return " X "
        return "SYS" if self.apart in ((one, other), (other, one)) else "NV18"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(**changes)`: from then on `nvidia-smi` says so."""
    folder = tmp_path / "driver"
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "--query-gpu=index,uuid,name,compute_cap,memory.total,memory.free,driver_version)"
        f' cat "{folder}/query" ;;\n'
        f'topo) cat "{folder}/topology" ;;\n'
        '*) echo "Invalid option" >&2; exit 2 ;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(**changes: Any) -> None:
        made = replace(Machine(), **changes)
        (folder / "query").write_text(made.query())
        (folder / "topology").write_text(made.topology())

    make()
    return make


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorRT-LLM to import, here and in processes that start."""
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
    """One that decodes."""
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


@pytest.fixture(scope="module")
def built_for_h200(pair: Path) -> Path:
    return make_build(pair, hardware="hgx-h200")


def results(directory: Path, generate: bool | None = False) -> dict[str, str]:
    return {finding.name: finding.result for finding in examine(directory, generate)}


def bad(directory: Path) -> dict[str, str]:
    found = results(directory)
    return {n: r for n, r in found.items() if r in ("error", "warning") and n != "ports"}


def test_a_machine_without_anything_is_told_what_it_lacks(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = run("doctor", built)
    assert code == 1
    assert "Traceback" not in out + err
    assert "`nvidia-smi` shows no GPU, or is not there" in out
    assert "TensorRT-LLM is not installed in" in out
    code, out, _ = run("doctor", built, "--json")
    found = json.loads(out)
    checks = {check["name"]: check for check in found["checks"]}
    assert (code, found["healthy"]) == (1, False)
    assert checks["files"]["result"] == "passed"
    assert checks["generation"] == {
        "name": "generation",
        "result": "not checked",
        "found": "errors stand before it",
        "fix": "Mend them, or give --generate",
    }
    for name in ("driver", "gpu-count", "tensorrt-llm"):
        assert checks[name]["result"] == "error"
        assert checks[name]["fix"]


@pytest.mark.usefixtures("installed", "machine")
def test_a_machine_that_fits_is_well(built: Path) -> None:
    assert bad(built) == {}
    names = results(built)
    assert [name for name, result in names.items() if result == "not checked"] == []
    assert {"files", "driver", "gpu-model", "nvlink", "drafter-attention", "launcher"} <= {*names}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "finds"),
    [
        ({"count": 3}, {"gpu-count": "error"}),
        ({"driver": "550.163.01"}, {"driver": "warning"}),
        ({"used": {2: 40_000}}, {"gpu-memory": "warning"}),
        ({"used": {6: 40_000}}, {}),  # not one of the four that it takes
        ({"apart": (1, 3)}, {"nvlink": "warning"}),
        ({"apart": (3, 6)}, {}),
        (
            {"name": "hgx-h200"},
            {"gpu-model": "warning", "gpu-memory": "warning", "drafter-attention": "error"},
        ),
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


def test_the_matrix_of_links_is_read(machine: Callable[..., None]) -> None:
    machine(count=3, apart=(0, 2))
    assert not_on_nvlink() == [("GPU0", "GPU2")]


@pytest.mark.usefixtures("decoding", "machine")
def test_tensorrt_llm_judges_the_arguments_itself(pair: Path, tmp_path: Path) -> None:
    """Over the stand-in's `TorchLlmArgs`; what it refuses here we let through."""
    engine = Path(shutil.copytree(make_build(pair), tmp_path / "b", symlinks=True)) / "engines"
    engine = engine / "tensorrt_llm"
    assert refused_arguments(engine) == []
    with (engine / "llm_args.yaml").open("a") as file:
        file.write("max_batchsize: 3\n")
    [said] = refused_arguments(engine)
    assert "extra inputs are not permitted: max_batchsize" in said
    finding = next(
        each for each in examine(tmp_path / "b", False) if each.name == "arguments-taken"
    )
    assert finding.result == "error"
    assert finding.found.endswith(said)
    write_info(engine, replace(read_info(engine), version="1.4.0rc0"))
    with pytest.raises(NotKnown, match=r"1\.4\.0rc1 is installed, the build is for 1\.4\.0rc0"):
        refused_arguments(engine)


@pytest.mark.usefixtures("decoding")
def test_a_build_asks_tensorrt_llm_where_it_is_installed(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    shutil.copytree(STANDINS, site)
    args = site / "tensorrt_llm" / "llmapi" / "llm_args.py"
    args.write_text(
        args.read_text().replace("        check(given)\n", "        assert False, 'no'\n")
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    with pytest.raises(ConfigError, match="TorchLlmArgs refuses the arguments: no"):
        make_build(pair, gpus=2)


@pytest.mark.usefixtures("machine")
def test_another_version_is_an_error(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, says in (
        ("__version__ = '1.2.1'", "TensorRT-LLM 1.2.1; the build is for 1.4.0rc1"),
        ("raise ImportError('libcuda.so.1: not there')", "cannot be imported: ImportError: libcu"),
    ):
        (tmp_path / "tensorrt_llm.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (found,) = (each for each in examine(built, False) if each.name == "tensorrt-llm")
        assert found.result == "error"
        assert says in found.found
        assert "tensorrt-llm==1.4.0rc1" in found.fix


@pytest.mark.usefixtures("installed")
def test_the_drafter_needs_its_attention_kernels(
    built_for_h200: Path,
    machine: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(name="hgx-h200")
    assert bad(built_for_h200) == {"drafter-attention": "error"}
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bad(built_for_h200) == {}


@pytest.mark.usefixtures("installed", "machine")
def test_a_build_that_was_not_copied_whole_is_found(built: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "copy"))
    (copy / "engines" / "tensorrt_llm" / "target" / "model.safetensors").unlink()
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    first = next(examine(copy, False))
    assert (first.name, first.result) == ("files", "error")
    assert "tokenizer/tokenizer.json (changed)" in first.found
    assert "engines/tensorrt_llm/target/model.safetensors (missing)" in first.found


@pytest.mark.usefixtures("installed", "machine")
def test_a_path_with_a_space_is_an_error(built: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "my build"))
    assert bad(copy) == {"triton": "error"}


@pytest.mark.usefixtures("installed", "machine")
def test_a_port_in_use_is_a_warning(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = Ports(taken.getsockname()[1], 8001, 8002)
        monkeypatch.setattr(place, "PORTS", ports)
        (found,) = (each for each in examine(built, False) if each.name == "ports")
    assert found.result == "warning"
    assert str(ports.http) in found.found


@pytest.mark.usefixtures("installed", "machine")
def test_little_shared_memory_is_an_error(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda path: docker)
    assert bad(built) == {"shared-memory": "error"}


@pytest.mark.usefixtures("installed", "machine")
def test_a_target_on_the_hub_had_better_be_in_the_cache(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "copy"))
    engine, commit = copy / "engines" / "tensorrt_llm", "7" * 40
    target = {"id": "org/target", "revision": commit}
    write_info(engine, replace(read_info(engine), target=target))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--target" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    for number, result in enumerate(["warning", "warning", "passed"]):
        (found,) = (each for each in examine(copy, False) if each.name == "hub-target")
        assert found.result == result
        download = f"hf download org/target --revision {commit} --exclude 'original/*'"
        assert (download in found.fix) == (number < 2)
        if number < 2:
            (snapshot / shards[number]).write_bytes(b"x")
    args = {"model": "org/target", "revision": commit}
    assert with_cached_target(args) == {"model": str(snapshot)}
    assert with_cached_target(args | {"gpus_per_node": 4}) == args | {"gpus_per_node": 4}
    (snapshot / shards[0]).unlink()
    assert with_cached_target(args) == args


@pytest.mark.usefixtures("installed", "machine")
def test_several_machines_need_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pair(tmp_path, tied=False, heads=8, head_dim=8)
    build = make_build(tmp_path, hardware="gb300-nvl72-slice", gpus=8)
    assert read_info(build / "engines" / "tensorrt_llm").nodes == 2
    assert bad(build)["launcher"] == "error"
    for name in ("srun", "trtllm-llmapi-launch"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "launcher" not in bad(build)
    with pytest.raises(EngineError, match=r"takes 2 machines.*launch/slurm\.sh"):
        check_host(read_info(build / "engines" / "tensorrt_llm"))
    assert results(build, True)["generation"] == "not checked"


def first_generation(build: Path) -> tuple[str, str, float]:
    """Result, what was found, and the acceptance length in it."""
    finding = next(each for each in examine(build, None) if each.name == "generation")
    found = re.search(r", (\d\.\d\d) tokens a round", finding.found)
    assert found
    return finding.result, finding.found, float(found[1])


@pytest.mark.usefixtures("decoding", "machine")
def test_a_first_generation_says_what_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = teach(make_pair(tmp_path, tied=False))
    monkeypatch.setattr(
        decoding_checks, "chat_prompts", lambda *_: [text[:12] for text in texts[:2]]
    )
    result, found, length = first_generation(make_build(tmp_path))
    assert result == "passed"
    assert "128 tokens of 2 prompts, loaded in" in found
    assert "nothing is published for this pair" in found
    assert length > 1.5


@pytest.mark.usefixtures("decoding", "machine")
def test_a_drafter_that_is_not_the_published_one_is_found_out(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path / "target")
    shutil.copytree(pair / "drafter", tmp_path / "gpt-oss-20b-DFlash")
    result, found, length = first_generation(make_build(tmp_path, "gpt-oss-20b-DFlash"))
    assert result in ("warning", "error")  # around what is no acceptance at all
    assert "of 6 prompts" in found
    assert length < 2


@pytest.mark.usefixtures("decoding", "machine")
def test_a_generation_that_fails_names_its_log(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(shutil.copytree(STANDINS, tmp_path / "broken")) / "tensorrt_llm"
    text = "def __init__(self, **args):\n        raise RuntimeError('CUDA error: out of memory')"
    (package / "llm.py").write_text(f"class LLM:\n    {text}\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (found,) = (each for each in examine(built, True) if each.name == "generation")
    assert found.found == "TensorRT-LLM ended: RuntimeError: CUDA error: out of memory"
    log = Path(found.fix.removeprefix("Read its log: "))
    assert "Traceback" in log.read_text()


@pytest.mark.usefixtures("decoding", "machine")
def test_under_load_texts_stay_and_drafts_are_accepted(tmp_path: Path) -> None:
    """All four checks of a pair that was taught, over the stand-in; plain decoding finds no
    drafter beside the target, as in the Hub's cache."""
    teach(make_pair(tmp_path, tied=False))
    (tmp_path / "drafter").rename(tmp_path / "elsewhere")
    args = {"guided_decoding_backend": "llguidance"}
    build_dir = make_build(tmp_path, "elsewhere", concurrency=8, checkpoints="link", args=args)
    found = {each.name: each for each in examine(build_dir, True)}
    load, kinds, texts = (
        found[name] for name in ("acceptance-under-load", "acceptance-by-kind", "greedy-texts")
    )
    assert re.match(r"tokens a round: 8 at once \d\.\d\d", load.found)
    for name in ("tool call", "guided JSON", "JSON", "long prompt", "second turn"):
        assert re.search(rf"\b{name} \d\.\d\d", kinds.found), kinds.found
    assert texts.result == "passed"
    assert texts.found == "64 of 64 greedy texts are plain decoding's"


@pytest.mark.models
@pytest.mark.usefixtures("decoding", "machine")
def test_a_build_of_one_sequence_has_no_load_but_texts(tmp_path: Path) -> None:
    teach(make_pair(tmp_path, tied=False))
    found = {each.name: each for each in examine(make_build(tmp_path, concurrency=1), True)}
    assert found["acceptance-under-load"].result == "not checked"
    assert found["greedy-texts"].found.startswith("64 of 64 ")


def texts_of(*last: int, error: str | None = None) -> Measured:
    return Measured("64 at once", [[5, 6, token] for token in last], error=error)


@pytest.mark.parametrize(
    ("likeliest", "drafts", "result", "says"),
    [
        ({7: -0.7, 8: -0.8}, (7, 7, 7), "passed", "3 of 3 greedy texts are plain decoding's"),
        (
            {7: -0.7, 8: -0.8},
            (7, 8, 7),
            "passed",
            "2 of 3 .* at token 3 or later, all at near-t.*0.10",
        ),
        ({7: -0.2, 8: -1.8}, (7, 8, 7), "warning", "text 2, token 3: the draft's is 1.60 behind"),
        ({7: -0.2, 8: -1.8}, (8, 8, 7), "error", "1 of 3 .* 2 of them at no near-tie"),
        ({7: -0.2, 8: -1.8}, (7, 9, 7), "warning", "is not among plain decoding's likeliest"),
        (None, (7, 8, 7), "warning", "not known: TensorRT-LLM told no log-probabilities"),
    ],
)
def test_how_texts_are_compared(
    likeliest: dict[int, float] | None, drafts: tuple[int, ...], result: str, says: str
) -> None:
    told = [[{5: 0.0}, {6: 0.0}, likeliest] for _ in drafts] if likeliest else []
    plain = replace(texts_of(7, 7, 7), likeliest=told)
    seen = decoding_checks.compared(texts_of(*drafts), plain)
    assert result == ("passed" if seen.ok else seen.severity or "warning")
    assert re.search(says, seen.what), seen.what


def test_a_text_that_ends_sooner_is_no_near_tie() -> None:
    plain = replace(texts_of(7), likeliest=[[{5: 0.0}, {6: 0.0}, {7: -0.7, 8: -0.8}]])
    shorter = Measured("64 at once", [[5, 6]])
    assert "1 of them at no near-tie" in decoding_checks.compared(shorter, plain).what


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
    seen = decoding_checks.judged(Measured("x", acceptance_length=length), info, "384 tokens")
    assert result == ("passed" if seen.ok else seen.severity or "error")
    assert ("at least 2.96 is believed (a card)" in seen.what) == bool(lowest and (length or 0) > 2)
    kinds = [Measured("JSON", acceptance_length=4.0), Measured("x", acceptance_length=length)]
    worst = decoding_checks._lowest(kinds, info)
    assert length is None or result == ("passed" if worst.ok else worst.severity or "error")
    under_load = decoding_checks._lowest(kinds[:1], info, least=4.5)
    assert under_load.severity == "warning"
    assert not under_load.ok
    failed = decoding_checks._lowest([Measured("JSON", error="RequestError: no")], info)
    assert (failed.ok, failed.severity) == (False, None)
    assert "JSON RequestError: no" in failed.what


def test_a_drafter_that_knows_no_long_prompts_is_a_warning(built: Path) -> None:
    """The demo pair, which learnt 512 tokens, accepts 1.02 a round after 7,000; no other does."""
    info = read_info(built / "engines" / "tensorrt_llm")
    kinds = [
        Measured("JSON", acceptance_length=2.9),
        Measured("long prompt", acceptance_length=1.02),
    ]
    ok, what, fix, severity = decoding_checks._lowest(kinds, info)
    assert (ok, severity) == (False, "warning")
    assert "long prompt 1.02" in what
    assert "limit serving.max_seq_len" in fix
    for other in (replace(kinds[0], acceptance_length=1.0), replace(kinds[0], error="no")):
        worse = decoding_checks._lowest([*kinds, other], info)
        assert (worse.ok, worse.severity) == (False, None)


def test_what_is_believed_at_least_is_the_engines_own_figure() -> None:
    """TensorRT-LLM's own test of four drafts, for as many or more; otherwise another engine's."""
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
    assert list(results(pair / "graphs")) == ["files", "shared-memory", "triton", "ports"]


def test_what_is_no_build_is_said(tmp_path: Path) -> None:
    code, _, err = run("doctor", tmp_path)
    assert code == 1
    assert "is not a directory that dflash-trt built" in err


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


def test_nothing_of_tensorrt_llm_is_imported_here() -> None:
    assert "tensorrt_llm" not in sys.modules
