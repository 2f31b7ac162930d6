"""A bundle served as its image serves it: the Dockerfile's command and environment, the real mpirun
and tritonserver, and the stand-ins of `trtllm-llmapi-launch` and `tensorrt_llm`.

Eight ranks run on whatever cores there are. What they would compute, the stand-in's `LLM` does.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from dflash_trt.builder.pipeline import build
from dflash_trt.serving.ports import Ports
from tests.support.builds import config_of, quiet
from tests.support.llm_build import STANDINS
from tests.support.pages import ROOT
from tests.support.pairs import make_pair
from tests.support.processes import command_line, environment_of, status_of, tree
from tests.support.request_tools import tensors, wait_until
from tests.support.servers import serve_ports
from tests.unit.test_deployment import KEY

WAIT = 90.0
STREAMS = 6  # over each door
LONG = 900  # tokens: some seconds, here
SECRET = "0123456789abcdef" * 2
GRPC_KEY = {"triton-grpc-protocol-inference-key": SECRET}
# an `srun --ntasks=1` around `serve`: mpirun would take its one slot for eight ranks
SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": os.uname().nodename,
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1",
}


@dataclass(frozen=True)
class Container:
    process: subprocess.Popen[bytes]
    ports: Ports
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=SECRET, max_retries=0)

    def ranks(self) -> list[int]:
        """Return the process of each rank, by number."""
        ranks = {}
        for pid in tree(self.process.pid):
            if any(".llmapi.mgmn_" in word for word in command_line(pid)):
                ranks[int(environment_of(pid)["OMPI_COMM_WORLD_RANK"])] = pid
        return [ranks[rank] for rank in sorted(ranks)]

    def triton(self) -> int:
        (pid,) = (
            pid for pid in tree(self.process.pid) if command_line(pid)[0].endswith("/tritonserver")
        )
        return pid


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    directory = tmp_path_factory.mktemp("bundles")
    make_pair(directory, heads=8, kv_heads=8, head_dim=8, vocab=200, longest=2048)
    bundles = {}
    for ranks in (1, 2, 8):
        engine = {"kind": "tensorrt_llm", "gpus": ranks, "args": {"max_batch_size": 2 * STREAMS}}
        bundles[ranks] = directory / f"ranks-{ranks}"
        build(config_of(directory, engine=engine), bundles[ranks], quiet)
    return bundles


def image_environment(bundle: Path, home: Path) -> dict[str, str]:
    """Return the variables of the image: its own folders are in `home`."""
    text = (bundle / "deploy" / "Dockerfile").read_text()
    lines = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    variables = dict(word.split("=", 1) for line in lines for word in line.split())
    folders = [STANDINS / "bin", Path(sys.executable).parent, "/usr/bin", "/bin"]
    path = os.pathsep.join(map(str, folders))
    variables = {
        name: value.replace("/home/dflash", str(home)).replace("$PATH", path)
        for name, value in variables.items()
    }
    modules = os.pathsep.join([str(STANDINS), str(ROOT)])  # of this tree, also in a copy of it
    return variables | {"PYTHONPATH": modules, "GRPC_ENABLE_FORK_SUPPORT": "0"}


def image_command(bundle: Path, ports: Ports, key: Path) -> list[str]:
    text = (bundle / "deploy" / "Dockerfile").read_text()
    (line,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    here = {"/mnt/models": str(bundle), KEY: str(key), "0.0.0.0": "127.0.0.1"}
    command = [here.get(word, word) for word in json.loads(line)]
    # a busy machine may need longer than a server's default for what still runs
    extra = [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--drain-seconds={WAIT}"]
    return [*command, *extra]


@contextmanager
def container(
    bundle: Path, home: Path, launcher: tuple[str, ...] = (), **variables: str
) -> Iterator[Container]:
    """Run the image's command until it is ready; at the end nothing of it is left."""
    home.mkdir(exist_ok=True)
    key = home / "key"
    key.write_text(SECRET)
    ports, output = serve_ports(), home / "output"
    with output.open("ab") as stream:
        process = subprocess.Popen(
            [*launcher, *image_command(bundle, ports, key)],
            env=image_environment(bundle, home) | variables,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    running = Container(process, ports, output)
    pids: set[int] = set()
    try:
        wait_until(lambda: "Ctrl-C" in running.said() or process.poll() is not None)
        assert process.poll() is None, running.said()[-3000:]
        pids = tree(process.pid)
        yield running
    finally:
        pids |= tree(process.pid)
        if process.poll() is None:
            process.kill()
        process.wait()
        wait_until(lambda: not alive(pids))


def stream_openai(served: Container, tokens: int) -> Iterator[tuple[str, int]]:
    """Yield at each piece why the text has ended, if it has, and its tokens, if they are told."""
    reason = ""
    with served.openai() as client:
        for chunk in client.completions.create(
            model="tiny",
            prompt="a",
            max_tokens=tokens,
            temperature=1.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
            yield reason, chunk.usage.completion_tokens if chunk.usage else 0


def stream_triton(served: Container, tokens: int) -> Iterator[tuple[str, int]]:
    """Yield at each piece why the text has ended, if it has, and its tokens so far."""
    results: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    request = {"text_input": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with InferenceServerClient(f"127.0.0.1:{served.ports.grpc}") as client:
        client.start_stream(lambda result, error: results.put((result, error)), headers=GRPC_KEY)
        client.async_stream_infer("dflash", tensors({**request, "temperature": 1.0}))
        reason = ""
        while not reason:
            result, error = results.get(timeout=WAIT)
            if error is not None:
                raise error
            reason = result.as_numpy("finish_reason")[0].decode()
            yield reason, int(result.as_numpy("completion_tokens")[0])


DOORS = (stream_openai, stream_triton)


def end_of(
    pieces: Iterator[tuple[str, int]], begun: threading.Semaphore | None = None
) -> tuple[str, int]:
    last = next(pieces)
    if begun is not None:
        begun.release()
    for last in pieces:  # noqa: B007
        pass
    return last


def refusal(served: Container) -> httpx.Response | None:
    """Return the answer to a new request if it is an error."""
    request = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {SECRET}"}
    answer = httpx.post(f"{served.url}/v1/completions", json=request, headers=headers, timeout=WAIT)
    return answer if answer.is_error else None


def alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if status_of(pid)]


def affinities(pids: set[int]) -> set[str]:
    return {status["Cpus_allowed_list"] for pid in pids if (status := status_of(pid))}


@pytest.mark.parametrize(("ranks", "around"), [(1, {}), (8, SLURM_STEP)])
def test_the_images_command_serves_until_told_to_stop(
    bundles: dict[int, Path], tmp_path: Path, ranks: int, around: dict[str, str]
) -> None:
    with container(bundles[ranks], tmp_path / "home", **around) as served:
        with served.openai() as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
        for door in DOORS:
            assert end_of(door(served, 8)) == ("length", 8)
        headers = {"Authorization": f"Bearer {SECRET}"}
        metrics = httpx.get(f"{served.url}/metrics", headers=headers).text
        assert re.search(r"^trtllm_prompt_tokens_total \d", metrics, re.MULTILINE)

        pids = tree(served.process.pid)
        assert len(served.ranks()) == ranks
        assert affinities(pids) == affinities({os.getpid()})
        for rank in served.ranks():
            assert environment_of(rank)["TLLM_NUMA_AWARE_WORKER_AFFINITY"] == "1"
            assert environment_of(rank)["TRTLLM_CACHE_DIR"].startswith(str(tmp_path))
        key = environment_of(served.triton())["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"]
        assert key not in served.said()
        assert SECRET not in served.said()

        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(2 * STREAMS) as pool:
            streams = [
                pool.submit(end_of, door(served, LONG), begun)
                for door in DOORS
                for _ in range(STREAMS)
            ]
            for _ in streams:
                assert begun.acquire(timeout=WAIT)
            assert not any(stream.done() for stream in streams)
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refusal(served) is not None)
            late = refusal(served)
            ends = [stream.result(WAIT) for stream in streams]
        assert ends == [("length", LONG)] * (2 * STREAMS)
        assert late is not None
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) > 0
        assert served.process.wait(WAIT) == 0
        wait_until(lambda: not alive(pids))
        assert "noticed that" not in served.said()  # of mpirun, when a process fails


@pytest.mark.parametrize("victim", ["last rank", "first rank", "Triton's model"])
def test_whatever_dies_the_whole_job_starts_again(
    bundles: dict[int, Path], tmp_path: Path, victim: str
) -> None:
    began = time.time()
    with container(bundles[2], tmp_path / "home") as served:
        before = set(served.ranks()) | {served.triton()}
        (job,) = (pid for pid in tree(served.process.pid) if "prterun" in command_line(pid)[0])
        (model,) = (pid for pid in tree(served.triton()) if "dflash/1/model.py" in words(pid))
        pid = {"last rank": served.ranks()[1], "first rank": served.ranks()[0]}.get(victim, model)
        open_stream = stream_triton(served, 2000)
        next(open_stream)
        os.kill(pid, signal.SIGKILL)
        with suppress(InferenceServerException):  # Triton is gone before it can say so
            assert end_of(open_stream)[0] == "error"
        wait_until(lambda: "the server is ready again" in served.said())
        assert "restarting the server now" in served.said()
        assert not alive(before)
        files = Path(f"/tmp/ompi.{job}")  # of mpirun; another of this number may have left some
        assert not files.exists() or files.stat().st_mtime < began
        assert len(served.ranks()) == 2
        assert affinities(tree(served.process.pid)) == affinities({os.getpid()})
        for door in DOORS:
            assert end_of(door(served, 8)) == ("length", 8)


def words(pid: int) -> str:
    return " ".join(command_line(pid))


def test_nothing_is_left_when_serve_is_killed(bundles: dict[int, Path], tmp_path: Path) -> None:
    with container(bundles[2], tmp_path / "home") as served:
        pids = tree(served.process.pid)
        served.process.kill()
        wait_until(lambda: not alive(pids))


def test_a_hung_job_ends_with_the_server(bundles: dict[int, Path], tmp_path: Path) -> None:
    """Neither mpirun nor a rank answers; the end of mpirun alone would leave the rank behind."""
    with container(bundles[2], tmp_path / "home") as served:
        pids = tree(served.process.pid)
        (job,) = (pid for pid in pids if "prterun" in command_line(pid)[0])
        for pid in (job, served.ranks()[1]):
            os.kill(pid, signal.SIGSTOP)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WAIT) == 0
        assert not alive(pids)


MPIRUN = ("mpirun", "-np", "2", "--host", "localhost:2", "--bind-to", "none")
LAUNCHED = (*MPIRUN, "--allow-run-as-root", "trtllm-llmapi-launch")


def test_a_launched_serve_starts_triton_alone(bundles: dict[int, Path], tmp_path: Path) -> None:
    """As on several machines: the scheduler starts the launcher, and that `serve`."""
    with container(bundles[2], tmp_path / "home", LAUNCHED) as served:
        assert len(served.ranks()) == 2
        names = [Path(command_line(pid)[0]).name for pid in tree(served.process.pid)]
        assert names.count("prterun") + names.count("mpirun") == 1
        for door in DOORS:
            assert end_of(door(served, 8)) == ("length", 8)
        os.kill(parent_of(served.triton()), signal.SIGTERM)
        assert served.process.wait(WAIT) == 0


def test_a_launched_serve_that_fails_ends_the_job(bundles: dict[int, Path], tmp_path: Path) -> None:
    with container(bundles[2], tmp_path / "home", LAUNCHED) as served:
        (model,) = (pid for pid in tree(served.triton()) if "dflash/1/model.py" in words(pid))
        os.kill(model, signal.SIGKILL)
        assert served.process.wait(WAIT) != 0
        assert "ranks of a launched job cannot start again" in served.said()


def parent_of(pid: int) -> int:
    return int(status_of(pid)["PPid"])


@pytest.mark.parametrize("missing", ["mpirun", "trtllm-llmapi-launch"])
def test_what_starts_the_ranks_is_missed_by_name(
    bundles: dict[int, Path], tmp_path: Path, missing: str
) -> None:
    """Without tensorrt_llm's launcher or Open MPI nothing is started."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in (STANDINS / "bin", Path(sys.executable).parent):
        for file in folder.iterdir():
            if file.name != missing and not (programs / file.name).exists():
                (programs / file.name).symlink_to(file)
    environment = image_environment(bundles[1], tmp_path) | {"PATH": f"{programs}:/usr/bin:/bin"}
    options = [f"--{kind}-port={getattr(serve_ports(), kind)}" for kind in ("http", "grpc")]
    done = subprocess.run(
        [sys.executable, "-m", "dflash_trt", "serve", bundles[1], *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 1
    assert f"there is no {missing} on PATH" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ranks_that_do_not_start_are_told_with_the_log(
    bundles: dict[int, Path], tmp_path: Path
) -> None:
    launcher = tmp_path / "bin" / "trtllm-llmapi-launch"
    launcher.parent.mkdir()
    # mpirun does not know of a process in a group of its own, which it leaves behind
    helper = f"set -m; (trap '' TERM HUP; exec sleep 1000) & echo $! > {tmp_path}/helper"
    launcher.write_text(f"#!/bin/bash\n{helper}\necho the ranks are on strike >&2\nexit 3\n")
    launcher.chmod(0o755)
    environment = image_environment(bundles[1], tmp_path)
    log = tmp_path / "log"
    options = [f"--{kind}-port={getattr(serve_ports(), kind)}" for kind in ("http", "grpc")]
    done = subprocess.run(
        [sys.executable, "-m", "dflash_trt", "serve", bundles[1], *options, f"--log-file={log}"],
        env=environment | {"PATH": f"{launcher.parent}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 1
    assert f"TensorRT-LLM's ranks did not start. Read its log: {log}" in done.stderr
    assert "on strike" in log.read_text()
    assert not alive({int((tmp_path / "helper").read_text())})
