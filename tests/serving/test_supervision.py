"""`dflash-trt serve` over the real server: what it does when a process dies, hangs or is told to
stop."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.config import load_config
from dflash_trt.errors import ServerError, UnavailableError
from dflash_trt.serving.client import Client, stream
from dflash_trt.serving.supervisor import run, supervisor
from dflash_trt.serving.supervisor.application import Application
from dflash_trt.serving.supervisor.children import STUB
from dflash_trt.serving.supervisor.clients import ApplicationClient
from dflash_trt.serving.supervisor.leftovers import SHARED_MEMORY
from dflash_trt.serving.supervisor.process import Server
from dflash_trt.serving.supervisor.upkeep import KeyFile, Upkeep
from tests.support.processes import command_line, processes_naming
from tests.support.request_tools import metric, wait_until
from tests.support.servers import serve_ports, serving, started
from tests.support.transports import Roads

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
WAIT = 60.0  # seconds; nothing here should take so long
STOP = 25.0  # seconds: exit timeout 5 + 3, killing, and a slow machine
PLAIN = 3  # plain requests beside the streams
LONG = 400  # tokens of a request that is still running when something happens to it


@dataclass
class Supervised:
    server: Server
    application: Application
    said: list[str]
    told: list[str]  # to the application
    result: Future[None]  # of supervise()
    text: list[int]  # what the server answers while it is well
    url: str

    def pid(self, model: str) -> int:
        if model == "tritonserver":
            return self.server.process.pid
        (pid,) = (pid for pid, name in self.server.stubs().items() if name == model)
        return pid

    def regions(self) -> set[str]:
        return {path.name for path in SHARED_MEMORY.glob(f"{self.server.shm_prefix}*")}

    def restarts(self, process: str) -> int:
        page = httpx.get(f"{self.url}/metrics", timeout=WAIT).text
        found = re.search(rf'dflash_restarts_total{{process="{process}"}} (\d+)', page)
        assert found is not None
        return int(found[1])

    def wait_until(self, words: str) -> str:
        wait_until(lambda: any(words in line for line in self.said))
        return next(line for line in self.said if words in line)


def _ask(server: Server, max_tokens: int, temperature: float = 0.0) -> list[int]:
    url = f"127.0.0.1:{server.ports.grpc}"
    options = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    return [token for chunk in stream(url, "def main():", **options) for token in chunk.token_ids]


def _post(url: str, path: str, body: object) -> int | None:
    """Return the HTTP status; None without an answer."""
    with suppress(httpx.HTTPError):
        return httpx.post(f"{url}/v2/models/{path}", json=body, timeout=2 * WAIT).status_code
    return None


def _infer(url: str, max_tokens: int) -> int | None:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [max_tokens]},
        {"name": "temperature", "shape": [1], "datatype": "FP32", "data": [1.0]},
        {"name": "ignore_eos", "shape": [1], "datatype": "BOOL", "data": [True]},
    ]
    return _post(url, "dflash_infer/infer", {"inputs": inputs})


@contextmanager
def _supervised(directory: Path) -> Iterator[Supervised]:
    stop, said, told = threading.Event(), list[str](), list[str]()
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        ports = serve_ports()
        options = run.Options(ports.http, ports.grpc)
        server, application = run.set_up(
            stack, OpenedBuild(directory, "none"), options, keep_log=True
        )
        stack.enter_context(server)
        application.start(server.log)
        server.wait_ready()
        application.tell("ready")
        tell = application.tell
        application.tell = lambda phase: (told.append(phase), tell(phase))[1]  # type: ignore[method-assign]
        door = ApplicationClient(ports.http, options.security)
        stack.callback(door.close)
        upkeep = Upkeep(application, KeyFile(None, (), said.append), server.log, said.append)
        watched = supervisor.Supervised(server, application, door, upkeep, said.append)
        result = pool.submit(supervisor.supervise, watched, stop)
        try:
            url = f"http://127.0.0.1:{ports.http}"
            yield Supervised(server, application, said, told, result, _ask(server, 32), url)
        finally:
            stop.set()
            result.result(WAIT)
            server.kill()  # faster than stopping it
            shutil.rmtree(server.log.path.parent, ignore_errors=True)


@pytest.fixture(scope="module")
def supervised(built: Path) -> Iterator[Supervised]:
    with pytest.MonkeyPatch.context() as patch, _supervised(built) as each:
        patch.setattr(supervisor, "HEALTHY", 0.0)  # each test begins a new row of restarts
        yield each


@pytest.mark.parametrize("model", ["verify", "draft", "dflash", "dflash_infer", "tritonserver"])
def test_a_killed_process_is_replaced(supervised: Supervised, model: str) -> None:
    server, said, regions = supervised.server, supervised.said, supervised.regions()
    said.clear()
    before = supervised.restarts("server")
    with ThreadPoolExecutor(3) as streaming, ThreadPoolExecutor(PLAIN) as waiting:
        streams = [streaming.submit(_ask, server, LONG, 1.0) for _ in range(3)]
        answers = [waiting.submit(_infer, supervised.url, LONG) for _ in range(PLAIN)]
        time.sleep(0.3)
        os.kill(supervised.pid(model), signal.SIGKILL)
        killed = time.monotonic()
        for each in streams:
            with pytest.raises(ServerError):
                each.result(WAIT)
        assert all(each.result(WAIT) != 200 for each in answers)
        assert time.monotonic() - killed < 10
    supervised.wait_until("ready again")
    assert len(said) == 2
    assert re.search(rf"{model} (ended|.*exit -9)", said[0])
    assert "restarting" in said[0]
    assert _infer(supervised.url, 1) == 200
    assert _ask(server, 32) == supervised.text
    assert supervised.regions()
    assert supervised.regions().isdisjoint(regions)
    assert supervised.restarts("server") == before + 1


@pytest.mark.parametrize("model", ["verify", "tritonserver"])
def test_a_hung_process_is_replaced(
    built: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PROBE_INTERVAL", 0.5)
    monkeypatch.setattr(supervisor, "HANG_TIMEOUT", 2.0)
    with _supervised(built) as each:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(_ask, each.server, 2 * LONG, 1.0)
            time.sleep(0.3)
            os.kill(each.pid(model), signal.SIGSTOP)
            with pytest.raises(ServerError):
                running.result(WAIT)
        assert "no round for" in each.wait_until("restarting the server")
        each.wait_until("ready again")
        assert _ask(each.server, 32) == each.text


def test_a_busy_server_is_not_taken_for_hung(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is full for longer than the timeout, so that probes are refused."""
    monkeypatch.setattr(supervisor, "PROBE_INTERVAL", 0.2)
    monkeypatch.setattr(supervisor, "HANG_TIMEOUT", 2.0)
    serving = load_config(ROOT / "build_configs" / "pycode.yaml").serving
    clients = serving.slots + serving.max_queue + 8
    body = {"text_input": "a", "max_tokens": LONG, "temperature": 1.0, "ignore_eos": True}
    with _supervised(built) as each, ThreadPoolExecutor(clients) as pool:
        answers = [pool.submit(_post, each.url, "dflash/generate", body) for _ in range(clients)]
        wait_until(lambda: any(answer.done() and answer.result() == 503 for answer in answers))
        time.sleep(2 * supervisor.HANG_TIMEOUT)
        assert each.said == []
        each.server.process.kill()  # releases the clients


def test_it_never_gives_up(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "DELAYS", (0.0, 0.1))
    broken = tmp_path / "broken"
    shutil.copytree(built, broken)
    with _supervised(broken) as each:
        engine = broken / "engines" / "target" / "engine.json"
        text = engine.read_bytes()
        engine.unlink()
        os.kill(each.pid("verify"), signal.SIGKILL)
        said = each.wait_until("restart 4 in a row")
        assert any(re.search(r"the restart failed: .*engine\.json", line) for line in each.said)
        assert not each.result.done(), said
        engine.write_bytes(text)
        each.wait_until("ready again")
        assert _ask(each.server, 32) == each.text


@contextmanager
def _another_build_in_its_place(build: Path) -> Iterator[None]:
    aside = build.with_name("aside")
    build.rename(aside)
    shutil.copytree(aside, build)
    manifest = build / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")  # names another build
    try:
        yield
    finally:
        shutil.rmtree(build)
        aside.rename(build)


PHASES = ("verify", "draft", "dflash", "dflash_infer", "tritonserver", "application", "start")


def test_only_the_build_that_was_opened_is_started(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DELAYS", (0.0, 0.1))
    monkeypatch.setattr(supervisor, "HEALTHY", 0.0)
    directory = Path(shutil.copytree(built, tmp_path / "built"))
    with _supervised(directory) as each:
        for phase in PHASES:
            each.said.clear()
            if phase == "start":
                old = each.server.process.pid
                os.kill(each.pid("verify"), signal.SIGKILL)
                wait_until(lambda pid=old: each.server.process.pid != pid)
            with _another_build_in_its_place(directory):
                if phase == "application":
                    each.application.kill()
                elif phase != "start":
                    os.kill(each.pid(phase), signal.SIGKILL)
                each.wait_until("changed after it was opened: it is another build")
                time.sleep(0.5)  # for several attempts
                assert _infer(each.url, 1) != 200, phase
            wait_until(lambda: _infer(each.url, 1) == 200)
            assert _ask(each.server, 32) == each.text


def test_a_killed_application_is_replaced_alone(supervised: Supervised) -> None:
    pid = supervised.application._process.pid  # type: ignore[union-attr]
    before, url = supervised.pid("dflash"), supervised.url
    os.kill(pid, signal.SIGKILL)
    supervised.wait_until("the application ended (exit -9)")
    wait_until(lambda: httpx.get(f"{url}/v2/health/ready", timeout=WAIT).status_code == 200)
    assert supervised.pid("dflash") == before
    assert supervised.restarts("application") >= 1


def test_a_hung_application_is_replaced_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PROBE_INTERVAL", 0.5)
    monkeypatch.setattr(supervisor, "HANG_TIMEOUT", 2.0)
    with _supervised(built) as each:
        before = each.pid("dflash")
        process = each.application._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        each.wait_until("the application has not answered for")
        each.wait_until("the application ended (exit -9)")
        wait_until(lambda: _infer(each.url, 1) == 200)
        assert each.pid("dflash") == before
        assert not any("no round" in line for line in each.said)


@contextmanager
def _stranger(prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that names itself as a model's of a server, and is no child of that."""
    words = [
        f"/tmp/{STUB}",
        "-c",
        "import time; time.sleep(1000)",
        "/none/draft/1/model.py",
        prefix,
    ]
    process = subprocess.Popen(words, executable=sys.executable)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_another_process_with_its_words_is_not_taken_for_a_model(built: Path) -> None:
    with _supervised(built) as each, _stranger(each.server.shm_prefix) as first:
        os.kill(each.pid("draft"), signal.SIGKILL)  # it looks for its models again
        each.wait_until("ready again")
        each.said.clear()
        with _stranger(each.server.shm_prefix) as second:
            assert {first.pid, second.pid}.isdisjoint(each.server.stubs())
            first.kill()
            first.wait()
            time.sleep(4 * supervisor.POLL)
            assert each.said == []
            each.server.kill()
            assert second.poll() is None


def test_it_can_be_stopped_while_it_waits_to_restart(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DELAYS", (1000.0,))
    with _supervised(built) as each:
        os.kill(each.pid("draft"), signal.SIGKILL)
        each.wait_until("restarting the server in 1000 s")
        start = time.monotonic()
    assert time.monotonic() - start < STOP


def test_it_serves_from_where_pythonpath_points(built: Path, tmp_path: Path) -> None:
    """After `pip install --target`, Triton's models would ignore PYTHONPATH."""
    venv.create(tmp_path / "empty", with_pip=False)
    packages = sysconfig.get_path("purelib")
    ports = serve_ports()
    numbers = [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}"]
    command = [tmp_path / "empty/bin/python", "-m", "dflash_trt", "serve", built, *numbers]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), packages])}
    with started(command, env=environment, cwd=tmp_path) as (process, _):
        assert list(stream(f"127.0.0.1:{ports.grpc}", "a", max_tokens=4))
        process.terminate()
        assert process.wait(WAIT) == 0


@contextmanager
def _serve(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """Start `dflash-trt serve`; return its process, gRPC port and log once it is ready."""
    ports = serve_ports()
    with serving(directory, ports) as (process, said):
        found = re.search(r"\S+/server\.log", said)
        assert found is not None
        log = Path(found[0])
        try:
            yield process, ports.grpc, log
        finally:
            process.kill()
            shutil.rmtree(log.parent, ignore_errors=True)


def _prefix(log: Path) -> str:
    """Return the prefix of the shared memory of the server that writes this log."""
    (server,) = (pid for pid in processes_naming(str(log.parent)) if _words(pid, "--model-repo"))
    found = re.search(r"dflash_trt_\w{12}_", _words(server, "shm-region-prefix-name"))
    assert found is not None
    return found[0]


def _words(pid: int, text: str) -> str:
    return next((word for word in command_line(pid) if text in word), "")


def test_no_process_stays_when_serve_is_killed_and_nothing_else_after_the_next_start(
    built: Path,
) -> None:
    before = {*Path("/tmp").glob("python_env_*")}
    with _serve(built) as (process, _, log):
        of_triton = {*Path("/tmp").glob("python_env_*")} - before
        prefix = _prefix(log)
        process.kill()
        wait_until(lambda: not processes_naming(prefix))
        with _serve(built) as (_, port, _):
            assert not [*SHARED_MEMORY.glob(f"{prefix}*")]
            assert [path.name for path in log.parent.iterdir()] == ["server.log"]
            assert of_triton
            assert not [path for path in of_triton if path.exists()]
            assert list(stream(f"127.0.0.1:{port}", "a", max_tokens=4))


@pytest.mark.parametrize("signals", [1, 2])
def test_stopping_is_bounded(built: Path, signals: int) -> None:
    with _serve(built) as (process, port, log):
        prefix = _prefix(log)
        chunks = stream(f"127.0.0.1:{port}", "a", max_tokens=LONG, temperature=1.0, ignore_eos=True)
        next(chunks)
        for model, number in (("verify", signal.SIGSTOP), ("dflash_infer", signal.SIGKILL)):
            pids = [pid for pid in processes_naming(prefix) if _words(pid, f"/{model}/1/")]
            os.kill(pids[0], number)
        start = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.wait(WAIT) == 0
        assert time.monotonic() - start < (STOP if signals == 1 else 5)
        with pytest.raises(ServerError):
            list(chunks)
        assert [*processes_naming(prefix), *SHARED_MEMORY.glob(f"{prefix}*")] == []
        assert log.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_runs_under_32_clients_ends_well(built: Path, number: signal.Signals) -> None:
    ports, roads = serve_ports(), list[Roads]()
    url = f"http://127.0.0.1:{ports.http}"

    def ask(client: int) -> str:
        own = Roads(ports, temperature=1.0)  # few drafts are accepted, so that all run at once
        roads.append(own)
        return own.all[client % 7]("a", LONG, None)[1]

    def arrived() -> float:
        """Return how many wait, run or have ended: the first may end before the last one comes."""
        states = ("trtllm_num_requests_running", "trtllm_num_requests_waiting")
        counts = [*states, "dflash_requests_total"]
        return sum(sum(metric(ports.metrics, name).values()) for name in counts)

    with serving(built, ports, "--drain-seconds=60") as (process, _):
        before = arrived()
        with ThreadPoolExecutor(32) as pool:
            asked = [pool.submit(ask, client) for client in range(32)]
            wait_until(lambda: arrived() - before >= 32)
            assert not all(each.done() for each in asked)
            process.send_signal(number)
            assert [each.result(WAIT) for each in asked] == ["length"] * 32
        for each in roads:
            each.close()
        assert process.wait(WAIT) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_requests_that_take_too_long_are_told_so(built: Path) -> None:
    ports = serve_ports()
    url = f"127.0.0.1:{ports.grpc}"
    options = {"max_tokens": LONG, "temperature": 1.0, "ignore_eos": True}
    with serving(built, ports, "--drain-seconds=0.5") as (process, _):
        with Client(url) as client, ThreadPoolExecutor(30) as pool:
            streams = [client.stream("a", **options) for _ in range(30)]
            next(streams[0])
            rest = [pool.submit(list, each) for each in streams]
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            errors = [each.exception(WAIT) for each in rest]
        assert process.wait(WAIT) == 0
    unavailable = [error for error in errors if isinstance(error, UnavailableError)]
    assert len(unavailable) >= 20
    assert all("stopping" in str(error) for error in unavailable)
