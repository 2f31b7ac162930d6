"""Every command and snippet of README.md, docs/ and the examples' READMEs, run as the page has it.

`dflash-trt`, Python, curl, hf, openssl and the like are the real ones, against a real server of the
demo pair (with a chat template, as a chat model has). What needs Docker, GPUs, a cluster or an
index is a stand-in (`standin_tools.py`) that refuses what its reference does not have.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trustme
import yaml
from builds import edit
from hub import Repository, running_hub
from live import serving
from llm_build import STANDINS, write_llm_build
from pages import PAGES, ROOT, read, typed, walk
from test_doctor import Machine

from dflash_trt.build.run import build
from dflash_trt.config import BuildConfig
from dflash_trt.serving.ports import free_ports

FIRST_HOUR = "docs/first-hour.md"
# walks of more than 10 s
LONG = ("README.md", FIRST_HOUR, "docs/metrics.md", "docs/models.md", "docs/structure.md")
STANDIN_TOOLS = (
    *("aiperf", "dflash-trt", "docker", "enroot", "git", "kubectl", "make", "pip", "pytest"),
    *("python", "python3", "rsync", "sbatch", "scancel", "srun", "ssh"),
)
OVER_LLM = ("docs/bundles.md", "docs/serving_tensorrt_llm.md")  # their BUILD is TensorRT-LLM's
COMMIT = "b5c939de8f754692c1647ca79fbf85e8c1e70f8a"  # of gpt-oss-120b, in the published configs
DRAFTER = "z-lab/gpt-oss-120b-DFlash"
GPT_OSS = "build_configs/dgx-b300/gpt-oss-120b.yaml"
KEY = "0123456789abcdef0123456789abcdef"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
# a reader's own names, beside the files of `folder`
STANDS_FOR = {
    "docs/bundles.md": {"CONFIG": GPT_OSS},
    "docs/first-hour.md": {"CONFIG": str(ROOT / GPT_OSS)},
    "docs/planning.md": {"CONFIG": GPT_OSS},
    "docs/models.md": {"[DRAFTER]": "DRAFTER"},
    "docs/sources.md": {"ORG/NAME": "openai/gpt-oss-120b", "COMMIT": COMMIT},
    "docs/structure.md": {"COUNT": "2", "SEED": "1", "CONFIG": GPT_OSS},
}


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a chat template."""
    directory = tmp_path_factory.mktemp("pair")
    for role in ("target", "drafter"):
        shutil.copytree(ROOT / "examples" / "pycode" / role, directory / role)
    (directory / "target" / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def paths(pair: Path) -> dict[str, dict[str, str]]:
    return {role: {"path": str(pair / role)} for role in ("target", "drafter")}


@pytest.fixture(scope="module")
def pycode(chat_pair: Path) -> Path:
    config = BuildConfig(name="pycode", engine={"kind": "onnxruntime"}, **paths(chat_pair))
    build(config, chat_pair / "build", lambda *_: None)
    return chat_pair / "build"


@pytest.fixture(scope="module")
def servers(pycode: Path, chat_pair: Path) -> Iterator[dict[str, str]]:
    """A server of the pair, and one with TLS and a key: what stands for the ports of the pages."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(chat_pair / "ca.pem")
    for name, identity in (("server", "127.0.0.1"), ("me", "me")):
        issued = authority.issue_cert(identity, "triton.example.com")
        issued.private_key_pem.write_to_path(chat_pair / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(chat_pair / f"{name}.pem")
    (chat_pair / "key").write_text(f"{KEY}\n")
    plain, tls, extra = free_ports(), free_ports(), free_ports()
    options = {"grpc-cert": "server.pem", "grpc-key": "server.key", "inference-key-file": "key"}
    files = [f"--{option}={chat_pair / file}" for option, file in options.items()]
    with (
        serving(pycode, plain),
        serving(pycode, tls, *files),
    ):
        numbers = {"8000": plain.http, "8001": plain.grpc, "8002": plain.metrics}
        numbers |= {"8080": extra.http, "9002": extra.metrics}
        yield {"host:8001": f"127.0.0.1:{tls.grpc}"} | {k: str(v) for k, v in numbers.items()}


@pytest.fixture(scope="module")
def hub(chat_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Hub whose gpt-oss-120b is the demo pair."""
    directory = tmp_path_factory.mktemp("hub")
    for role in ("target", "drafter"):
        shutil.copytree(chat_pair / role, directory / role)
        edit(directory / role, max_position_embeddings=32768)  # of the published config
    for copies in ("original", "metal"):
        (directory / "target" / copies).mkdir()
        (directory / "target" / copies / "model.bin").write_bytes(b"once more")
    with running_hub() as hub:
        for name, role in (("openai/gpt-oss-120b", "target"), (DRAFTER, "drafter")):
            hub.repositories[name] = Repository(directory / role, {"main": COMMIT})
        # the copies of the weights that gpt-oss has in other formats are not to be fetched
        hub.failing = f"/openai/gpt-oss-120b/resolve/{COMMIT}/original", 500
        yield hub.url


@pytest.fixture(
    params=[
        pytest.param(page, marks=[pytest.mark.soak] if page in LONG else [])
        for page in PAGES
        if typed(page)
    ]
)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def names(page: str, servers: dict[str, str]) -> dict[str, str]:
    """What is put in for words of the page."""
    found = servers | STANDS_FOR.get(page, {})
    if page == FIRST_HOUR:  # which starts a server of its own
        found |= zip(("8000", "8001", "8002"), map(str, vars(free_ports()).values()), strict=True)
    return found


@pytest.fixture
def folder(page: str, chat_pair: Path, pycode: Path, tmp_path: Path) -> Path:
    """Where the reader types: this repository, with what the page takes for granted."""
    folder = tmp_path / "reader"
    (folder / "build").mkdir(parents=True)
    for each in ROOT.iterdir():
        if not each.name.startswith(".") and each.name != "build":
            (folder / each.name).symlink_to(each)
    files = {"TARGET": chat_pair / "target", "DRAFTER": chat_pair / "drafter"}
    files |= {each: chat_pair / each for each in ("ca.pem", "key", "me.key", "me.pem")}
    files |= {"after.json": folder / "before.json", "CONFIG": folder / "CONFIG.yaml"}
    files["KEY"] = chat_pair / "server.key"
    files["BUILD"] = shutil.copytree(pycode, folder / "build" / "pycode")
    if page != "README.md":  # which builds it
        files["DIR"] = files["BUILD"]
    if page in OVER_LLM:
        args = {"max_batch_size": 2, "max_seq_len": 512}
        files["BUILD"] = write_llm_build(tmp_path / "llm", chat_pair, args)
    for name, file in files.items():
        (folder / name).symlink_to(file)
    config = {"name": "x", "engine": {"kind": "onnxruntime"}} | paths(chat_pair)
    (folder / "CONFIG.yaml").write_text(yaml.safe_dump(config))
    (folder / "PROMPT.txt").write_text("def main():\n")
    (folder / "FILE.jsonl").write_text('{"text": "def main():"}\n{"text": "class A:"}\n')
    return folder


@pytest.fixture
def environment(
    page: str, names: dict[str, str], hub: str, tmp_path: Path
) -> Iterator[dict[str, str]]:
    """The stand-ins first on PATH; servers that they leave running end with the test."""
    state, programs, path = tmp_path / "state", tmp_path / "bin", os.environ["PATH"]
    for each in (state / "container", programs):
        each.mkdir(parents=True)
    tools = ROOT / "tests/lib/standin_tools.py"
    for name in STANDIN_TOOLS:
        write(programs / name, f'exec "{sys.executable}" "{tools}" {name} "$@"')
    # curl takes one of the two
    fails = 'case " $* " in *" --fail "*) ;; *) set -- --fail-with-body "$@" ;; esac'
    write(programs / "curl", f'{fails}; exec {shutil.which("curl")} "$@"')
    write_machine(state / "container")
    if page in OVER_LLM:
        write_machine(programs)
    yield os.environ | {
        "PATH": os.pathsep.join([str(programs), path]),
        "WALK_PATH": path,
        "WALK_STATE": str(state),
        "WALK_PORTS": ",".join(names[port] for port in ("8000", "8001", "8002")),
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(STANDINS) if page in OVER_LLM else "",
    }
    if (state / "pids").exists():
        for pid in (state / "pids").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)


def write(file: Path, line: str) -> None:
    file.write_text(f"#!/usr/bin/env bash\n{line}\n")
    file.chmod(0o755)


def write_machine(folder: Path) -> None:
    """Eight GPUs of a DGX B300, as `test_doctor.py` has them, and launchers as `test_bundle.py`."""
    machine = Machine()
    (folder / "query").write_text(machine.query())
    (folder / "topology").write_text(machine.topology())
    cases = f'case "$1" in --query-gpu=*) cat "{folder}/query" ;; topo) cat "{folder}/topology" ;;'
    write(folder / "nvidia-smi", f"{cases} *) exit 2 ;; esac")
    write(folder / "mpirun", 'while [ "$1" != bash ]; do shift; done; exec "$@"')
    write(folder / "trtllm-llmapi-launch", 'export TLLM_SPAWN_PROXY_PROCESS=1; exec "$@"')


def test_a_page_is_walked(
    page: str, names: dict[str, str], folder: Path, environment: dict[str, str]
) -> None:
    print(walk(typed(page), names, folder, environment))


@pytest.mark.soak
def test_the_demo_prints_what_the_page_shows() -> None:
    """But for its figures, and so the width of its table."""
    blocks = read("README.md")
    at = next(i for i, block in enumerate(blocks) if block.language == "console")
    command = blocks[at - 1].text.split()
    assert command[:2] == ["python", "examples/demo.py"]
    shutil.rmtree(ROOT / "build" / command[2], ignore_errors=True)  # else there is nothing to build
    done = subprocess.run(
        [sys.executable, "-u", *command[1:]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout

    def shape(text: str) -> list[str]:
        built = text[text.index("$ dflash-trt") :]  # pip may have had to fetch the model before
        lines = [line for line in built.splitlines() if line and not line.endswith(" ...")]
        return [re.sub(r"[\s━─]+", " ", re.sub(r"\d[\d.]*", "#", line)) for line in lines]

    assert shape(done.stdout) == shape(blocks[at].text)
