"""docs/dgx-b300.md as a reader types it from step 3 on, a small pair in place of gpt-oss-120b.

Real are the mpirun, the tritonserver, curl and all of `dflash-trt`; stand-ins (`tests/standins`)
are TensorRT-LLM, its launcher, nvidia-smi, the Hub, Docker and Slurm. Steps 1 and 2 and Kubernetes
need the published weights, an image and a cluster.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dflash_trt.serving.ports import Ports
from tests.support.chat_pair import TEMPLATE
from tests.support.commands import program
from tests.support.hub import Repository, running_hub
from tests.support.llm_build import STANDINS
from tests.support.pages import ROOT, Block, not_run, read, script
from tests.support.pairs import make_pair, teach
from tests.support.request_tools import wait_until
from tests.support.servers import serve_ports

pytestmark = pytest.mark.soak

PAGE = "docs/dgx-b300.md"
COMMIT = "0" * 39 + "7"
NAME = "gpt-oss-120b-dgx-b300"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str], Ports]]:
    """Set up the folder that holds the build `gpt-oss`, and what is on PATH there."""
    # of a few seeds the one whose drafter is best, as `doctor` judges it
    teach(make_pair(tmp_path, heads=8, kv_heads=4, tied=False, seed=2), steps=300)
    file = tmp_path / "target" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    folder, ports = tmp_path / "reader", serve_ports()
    for name in ("containers", "jobs", "cache", "home"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "cache").rmdir()  # the page makes it
    config = yaml.safe_load((ROOT / "build_configs/dgx-b300/gpt-oss-120b.yaml").read_text())
    for role in ("target", "drafter"):
        config[role] = {"hub": f"org/{role}", "revision": "main"}
    del config["drafters"], config["serving"]  # lengths that the small pair does not know
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with running_hub() as hub:
        for role in ("target", "drafter"):
            hub.repositories[f"org/{role}"] = Repository(tmp_path / role, {"main": COMMIT})
        programs = [ROOT / "tests/standins/programs", STANDINS / "bin", Path(sys.executable).parent]
        environment = os.environ | {
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "PYTHONPATH": str(STANDINS),
            "READER": str(folder),
            "IMAGE_HOME": str(folder / "home"),
            "HF_ENDPOINT": hub.url,
            "HTTP": str(ports.http),
            "GRPC": str(ports.grpc),
        }
        command = ["dflash-trt", "build", tmp_path / "config.yaml", "--output", folder / "gpt-oss"]
        laptop = environment | {"HF_HOME": str(tmp_path / "laptop")}
        done = program(*command, **laptop)
        assert done.returncode == 0, done.stderr
        yield folder, environment, ports


def section(title: str, end: str) -> list[Block]:
    """Return what is typed between two headings."""
    text = (ROOT / PAGE).read_text().splitlines()
    (first,) = (i for i, line in enumerate(text, 1) if line.startswith(title))
    (last,) = (i for i, line in enumerate(text, 1) if line.startswith(end))
    blocks = [block for block in read(PAGE) if first < block.line < last]
    return [block for block in blocks if block.language == "sh" and not not_run(block)]


def walk(blocks: list[Block], folder: Path, environment: dict[str, str], ports: Ports) -> str:
    done = subprocess.run(
        ["bash", "-c", script(blocks, {"8000": str(ports.http)})],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_with_docker(reader: tuple[Path, dict[str, str], Ports]) -> None:
    folder, environment, ports = reader
    out = walk(section("## 3. Check", "## 8. Measure"), folder, environment, ports)
    findings = re.findall(r"^  (passed|warning|error|not checked)  +[\w-]+ ", out, re.M)
    assert findings == ["passed"] * 11
    assert "8 GPUs (NVIDIA B300 SXM6 AC), and the build takes 8" in out
    assert re.search(r"this process may use (\d+) of \1 CPUs", out)
    for words in ("starting Triton", "\nready\n", "\nhealthy\n", f'"id":"{NAME}"', "data: [DONE]"):
        assert words in out
    assert re.search(r"^400 tokens, \d+ tokens/s, \d+ rounds, tau [\d.]+ \(length\)$", out, re.M)
    assert len(re.findall(r"mgmn_leader_node$", out, re.M)) >= 1
    assert len(re.findall(r"mgmn_worker_node$", out, re.M)) >= 7
    assert re.search(r"^trtllm_spec_decode_num_accepted_tokens_total \d", out, re.M)
    assert out.count("\ndflash_acceptance_length_") == 2
    assert "stopping ..." in (folder / "gpt-oss.log").read_text()
    assert out.splitlines()[-1] == "0"  # the exit code
    assert not list((folder / "containers").iterdir())


def test_with_slurm(reader: tuple[Path, dict[str, str], Ports]) -> None:
    folder, environment, ports = reader
    out = walk(section("## On Slurm", "## On Kubernetes"), folder, environment, ports)
    assert re.search(r"^400 tokens, .* \(length\)$", out, re.M)
    code = folder / "jobs" / "7" / "code"
    wait_until(code.exists)
    assert code.read_text() == "0\n"
    assert "\nready\n" in (folder / "gpt-oss-7.log").read_text()
