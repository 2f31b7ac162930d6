"""Every command and snippet of README.md, docs/ and the examples' READMEs, run as the page has it.

`dflash-trt`, Python, curl, hf, openssl and the like are the real ones, against a real server of the
demo pair (with a chat template, as a chat model has). What needs Docker, GPUs, a cluster or an
index is a stand-in (`standin_tools.py`) that refuses what its reference does not have.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer
import yaml
from hub import Repository, running_hub
from live import serving
from llm_build import STANDINS, write_llm_build
from pages import PAGES, ROOT, Block, read, walk
from test_checkpoints import edit
from test_doctor import Machine
from test_metrics import _check_query

from dflash_trt.build import build
from dflash_trt.cli import app
from dflash_trt.config import BuildConfig, load_config
from dflash_trt.serving.launch import Ports
from dflash_trt.serving.server import free_ports

# what is not run, by page and first line, and why
NOT_RUN = {
    ("docs/adaptive.md", "python scripts/adaptive_table.py"): "takes hours",
    ("docs/benchmarks.md", "python scripts/bench_table.py --shapes demo,60m,0.6b"): "takes hours",
    ("examples/pycode/README.md", "python train.py --work /somewhere/with/6GB --output ."): "hours",
    ("docs/operations.md", "docker run --init"): "an option for a line of one's own",
    ("docs/bundles.md", "kubectl kustomize"): "test_deployment.py runs it",
    ("docs/metrics.md", "promtool test rules tests/alerts_test.yml"): "test_metrics.py runs it",
    (
        "docs/clients.md",
        "│                        Request Error Rate (%) │   0.00 │",
    ): "AIPerf's words",
    ("docs/structure.md", "build/pycode/"): "a folder's files",
    ("docs/structure.md", "build/gpt-oss-120b/"): "a folder's files",
    ("docs/structure.md", "cli -> bench, build, doctor, planning"): "a picture",
    ("docs/operations.md", "2026-11-21 07:38:31+00:00 the process of draft"): "what serve prints",
}
# walks of more than 10 s
FIRST_HOUR = "docs/first-hour.md"
LONG = ("README.md", FIRST_HOUR, "docs/metrics.md", "docs/models.md", "docs/structure.md")
STANDIN_TOOLS = (
    *("aiperf", "dflash-trt", "docker", "git", "kubectl", "make", "pip", "pytest", "python"),
    *("python3", "rsync", "ssh"),
)
OVER_LLM = ("docs/bundles.md", "docs/serving_tensorrt_llm.md")  # their BUILD is TensorRT-LLM's
COMMIT = "b5c939de8f754692c1647ca79fbf85e8c1e70f8a"  # of gpt-oss-120b, in the published configs
GPT_OSS = "build_configs/dgx-b300/gpt-oss-120b.yaml"
KEY = "0123456789abcdef0123456789abcdef"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
PROGRAM = "#!/bin/sh\n"


def not_run(block: Block) -> tuple[str, str] | None:
    """Its entry in the list."""
    return next((key for key in NOT_RUN if key[0] == block.page and block.starts(key[1])), None)


def command_line(block: Block) -> list[str]:
    return shlex.split(block.text)[1:]


def unfinished(words: list[str]) -> bool:
    """Whether `dflash-trt WORDS` only names a command, its arguments left out.

    Fails on what the command line would refuse.
    """
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]  # type: ignore[attr-defined]
        words = words[1:]
    unknown = hasattr(command, "commands") and words and not words[0].startswith("-")
    assert not unknown, f"dflash-trt has no command {words[0]}"
    try:
        command.make_context("dflash-trt", list(words))
    except Exception as error:
        if type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError"):
            return True
        raise AssertionError(f"dflash-trt {' '.join(words)}: {error}") from error
    return False


def typed(page: str) -> list[Block]:
    """What a reader of the page types, each once."""
    found: dict[str, Block] = {}
    for block in read(page):
        if block.language not in ("sh", "python", "command") or not_run(block):
            continue
        mention = block.language == "command" and block.text.startswith("dflash-trt ")
        if not (mention and unfinished(command_line(block))):
            found.setdefault(block.text, block)
    return list(found.values())


# --- the pages -----------------------------------------------------------------------------------


def test_every_block_is_run_or_listed() -> None:
    """A new block is run by its language; a language without a runner has to be listed."""
    blocks = [block for page in PAGES for block in read(page)]
    run = {"sh", "python", "command", "yaml", "setting", "promql", "console"}
    others = [block for block in blocks if block.language not in run and not not_run(block)]
    assert not others
    assert {not_run(block) for block in blocks} - {None} == NOT_RUN.keys()  # none is stale
    assert {"sh", "python", "yaml", "promql", "console"} <= {block.language for block in blocks}


def test_a_wrong_command_line_is_found() -> None:
    for line in ("build x --nope", "bild x", "bench engin x", "verify x --max-tokens none"):
        with pytest.raises(AssertionError):
            unfinished(line.split())
    assert unfinished(["build", "--tp", "2"])


def test_every_option_is_on_a_page() -> None:
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    root = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    leaves = {**root, **root["bench"].commands}
    missing = {
        f"{name} {option}"
        for name, command in leaves.items()
        for parameter in command.params
        for option in parameter.opts[:1]
        if option.startswith("--") and not re.search(rf"{option}(?![\w-])", pages)
    }
    assert not missing


def of(*languages: str) -> list[Any]:
    blocks = [block for page in PAGES for block in read(page) if block.language in languages]
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in blocks]


@pytest.mark.parametrize("block", of("yaml", "setting"))
def test_the_config_reads_it(block: Block, tmp_path: Path) -> None:
    """Whole, or in place of a section of a config that builds; `a.b: c` is a path and a value."""
    found = yaml.safe_load(block.text)
    if "scrape_configs" in found:  # Prometheus's
        assert found["scrape_configs"][0].keys() == {
            "job_name",
            "scrape_interval",
            "static_configs",
        }
        assert all((ROOT / file).is_file() for file in found["rule_files"])
        return
    if block.language == "setting":
        ((path, value),) = found.items()
        for name in reversed(path.split(".")):
            value = {name: value}
        found = value
    kind = (
        "onnxruntime" if "serving.mode" in block.text or "ranks" in block.page else "tensorrt_llm"
    )
    config = yaml.safe_load((ROOT / "build_configs/pycode.yaml").read_text())
    config["engine"] = {"kind": kind}
    hub = {"hub": "openai/gpt-oss-120b", "revision": COMMIT}  # `checkpoints: hub` takes no path
    for section, value in ({"target": hub} | found).items():
        merged = isinstance(config.get(section), dict) and "kind" not in value
        config[section] = config[section] | value if merged and section == "engine" else value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("block", of("promql"))
def test_the_queries_are_of_what_is_exported(block: Block) -> None:
    for line in block.text.splitlines():
        _check_query(re.split(r"\s{2,}", line, maxsplit=1)[1])


@pytest.mark.soak
@pytest.mark.parametrize("block", of("console"))
def test_the_demo_prints_what_the_page_shows(block: Block) -> None:
    """But for its figures, and how many rounds there were."""
    shutil.rmtree(ROOT / "build" / "pycode", ignore_errors=True)  # else there is nothing to build
    demo = [sys.executable, "-u", ROOT / "examples" / "demo.py"]
    done = subprocess.run(demo, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout

    def shape(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if line and not line.endswith(" ...")]
        return [re.sub(r"\d[\d.]*( \d[\d.]*)*", "#", line) for line in lines]

    assert shape(done.stdout) == shape(block.text)


# --- the walk ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a chat template."""
    directory = tmp_path_factory.mktemp("pair")
    for role in ("target", "drafter"):
        shutil.copytree(ROOT / "examples" / "pycode" / role, directory / role)
    (directory / "target" / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def pycode(chat_pair: Path) -> Path:
    paths = {role: {"path": chat_pair / role} for role in ("target", "drafter")}
    config = BuildConfig(name="pycode", engine={"kind": "onnxruntime"}, **paths)
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
    options = (
        "--grpc-cert",
        "server.pem",
        "--grpc-key",
        "server.key",
        "--inference-key-file",
        "key",
    )
    files = [str(chat_pair / each) if "." in each or each == "key" else each for each in options]
    with (
        serving(pycode, plain, f"--openai-port={extra.http}"),
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
        for name, role in (
            ("openai/gpt-oss-120b", "target"),
            ("z-lab/gpt-oss-120b-DFlash", "drafter"),
        ):
            hub.repositories[name] = Repository(directory / role, {"main": COMMIT})
        # the copies of the weights that gpt-oss has in other formats are not to be fetched
        hub.failing = f"/openai/gpt-oss-120b/resolve/{COMMIT}/original", 500
        yield hub.url


@pytest.fixture
def desk(
    chat_pair: Path, pycode: Path, servers: dict[str, str], hub: str, tmp_path: Path
) -> Iterator[Callable[[str], tuple[dict[str, str], Path, dict[str, str]]]]:
    """`desk(page)`: names to put in, the folder that the page's reader is in, and the environment."""
    state, folder, programs = (tmp_path / each for each in ("state", "reader", "bin"))

    def prepare(page: str) -> tuple[dict[str, str], Path, dict[str, str]]:
        for each in (state / "container", folder / "build", programs):
            each.mkdir(parents=True)
        for each in ROOT.iterdir():
            if not each.name.startswith(".") and each.name != "build":
                (folder / each.name).symlink_to(each)
        files = {"TARGET": chat_pair / "target", "DRAFTER": chat_pair / "drafter"}
        files |= {each: chat_pair / each for each in ("ca.pem", "key", "me.key", "me.pem")}
        files |= {"after.json": folder / "before.json", "CONFIG": folder / "CONFIG.yaml"}
        files["BUILD"] = shutil.copytree(pycode, folder / "build" / "pycode")
        if page != "README.md":  # which builds it
            files["DIR"] = files["BUILD"]
        if page in OVER_LLM:
            args = {"max_batch_size": 2, "max_seq_len": 512}
            files["BUILD"] = write_llm_build(tmp_path / "llm", chat_pair, args)
        for name, file in files.items():
            (folder / name).symlink_to(file)
        config = {role: {"path": str(chat_pair / role)} for role in ("target", "drafter")}
        engine = {"kind": "onnxruntime"}
        (folder / "CONFIG.yaml").write_text(
            yaml.safe_dump({"name": "x", "engine": engine, **config})
        )
        (folder / "FILE.jsonl").write_text('{"text": "def main():"}\n{"text": "class A:"}\n')
        tools = Path(__file__).with_name("standin_tools.py")
        for name in STANDIN_TOOLS:
            write(programs / name, f'exec "{sys.executable}" "{tools}" {name} "$@"')
        write(programs / "curl", f'exec {shutil.which("curl")} --fail-with-body "$@"')
        write_machine(state / "container")
        if page in OVER_LLM:
            write_machine(programs)
        names = dict(servers)
        if page == FIRST_HOUR:  # which starts its own server
            own = map(str, vars(free_ports()).values())
            names |= zip(("8000", "8001", "8002"), own, strict=True)
        path = os.environ["PATH"]
        environment = os.environ | {
            "PATH": os.pathsep.join([str(programs), path]),
            "WALK_PATH": path,
            "WALK_STATE": str(state),
            "WALK_PORTS": ",".join(names[port] for port in ("8000", "8001", "8002")),
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(STANDINS) if page in OVER_LLM else "",
        }
        return names, folder, environment

    yield prepare
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


STANDS_FOR = {
    "docs/bundles.md": {"CONFIG": GPT_OSS},
    "docs/first-hour.md": {"CONFIG": str(ROOT / GPT_OSS)},
    "docs/planning.md": {"CONFIG": GPT_OSS},
    "docs/models.md": {"[DRAFTER]": "DRAFTER"},
    "docs/sources.md": {"ORG/NAME": "openai/gpt-oss-120b", "COMMIT": COMMIT},
    "docs/structure.md": {"COUNT": "2", "SEED": "1", "CONFIG": GPT_OSS},
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.soak] if page in LONG else [])
        for page in PAGES
        if typed(page)
    ],
)
def test_a_page_is_walked(page: str, desk: Any) -> None:
    names, folder, environment = desk(page)
    print(walk(typed(page), names | STANDS_FOR.get(page, {}), folder, environment))
