"""A tritonserver process: start it, wait until it is ready, stop it whatever state it is in."""

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_trt import tensorrt_llm
from dflash_trt.engines import CORES, ENGINE_FILE, engine_kind, rank_directory, read_info, roles
from dflash_trt.engines.tensorrt.machine import check_machine
from dflash_trt.errors import ServerError
from dflash_trt.files import size_of
from dflash_trt.serving import internal
from dflash_trt.serving.front import Control
from dflash_trt.serving.health import health_of
from dflash_trt.serving.log import FORM, Form, Log, Said
from dflash_trt.serving.ports import Ports, check_ports
from dflash_trt.serving.security import Security, check_exposure
from dflash_trt.serving.server import reaper
from dflash_trt.serving.server.launch import (
    EXIT_TIMEOUT,
    command,
    environment,
    find_binary,
    working_directory,
)
from dflash_trt.serving.server.reaper import KILL_TIMEOUT, clean_up, command_line, processes_naming

START_TIMEOUT = 3600.0  # seconds: TensorRT-LLM loads, tunes and captures graphs
START_CRASHES = 2
LOAD_TIMEOUT, LOADED = 120.0, 5e6  # seconds until engines are loaded; bytes of them in one more
EXIT_AFTER = 10.0  # seconds in which Triton ends when a model did not load
STUB_TIMEOUT = 60.0  # seconds until each model has a process
FIRST_TIMEOUT = 2.0  # seconds until it is asked again, so that a Ctrl-C is heard
REAPER_TIMEOUT = 10.0  # seconds
DRAFTER = "draft"  # the model
KILLED = "is not healthy"  # what Triton says of a model whose process was killed


class Server:
    """A tritonserver over a built directory, with its log and its runtime directory.

    As a context manager it runs for as long as the block; `start` starts it anew after `kill`.
    log: a file, whose folder exists; None: in the runtime directory, where it stays if `keep_log`,
    or if a ServerError names it; or another server's. form: of its lines. cores: that its engines
    take; None: all that there are.
    """

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        security: Security | None = None,
        log: Path | Log | None = None,
        form: Form = "text",
        *,
        keep_log: bool = False,
        cores: int | None = None,
    ) -> None:
        self.ports = ports
        self.cores = cores
        self.security = security or Security()
        self.repository = find_repository(directory)
        if any(character.isspace() for character in str(self.repository)):
            raise ServerError(  # Triton would wait for ever for its model processes
                f"Triton cannot serve from a path with a space in it: {self.repository}",
                "Move the build, or build into another directory",
            )
        self.models = {path.parents[1].name for path in self.repository.glob("*/1/model.py")}
        size = sum(map(size_of, roles(self.repository.parent / "engines")))
        # TensorRT-LLM, which has no engines of ours, tunes what it has loaded
        self._load_timeout = LOAD_TIMEOUT + size / LOADED if size else START_TIMEOUT
        self._variables = _variables(self.repository) | ({CORES: str(cores)} if cores else {})
        self.health = health_of(ports, self.security)
        check_ports(ports)
        self._runtime = internal.new_runtime()
        self._keep_log = keep_log
        try:
            self.log = (
                log if isinstance(log, Log) else Log(log or self._runtime / "server.log", form)
            )
        except ServerError:
            shutil.rmtree(self._runtime)
            raise
        self.control = Control(self._runtime / internal.SOCKET)
        self.shm_prefix = f"dflash_trt_{uuid.uuid4().hex[:12]}_"
        self._reaper: subprocess.Popen[bytes] | None = None
        self._stubs: dict[int, str] = {}  # the model processes seen since the start

    def __enter__(self) -> "Server":
        try:
            self._binary = find_binary(self._runtime)
            check_exposure(self.security, self._binary.path)
        except ServerError:
            shutil.rmtree(self._runtime)
            raise
        self._directory = working_directory(self._runtime)
        self.guard()
        self.start()
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self.stop()
        if self._reaper is not None:
            with suppress(subprocess.TimeoutExpired, OSError):  # closes its end of the pipe, too
                self._reaper.communicate(timeout=REAPER_TIMEOUT)
        if not self._keep_log:
            self.log.close()
        named = self._keep_log or isinstance(error, ServerError)
        for each in self._runtime.glob("*"):
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            elif each != self.log.path or not named:
                each.unlink()
        with suppress(OSError):  # the log is in there
            self._runtime.rmdir()

    def guard(self) -> bool:
        """Sees to it that a reaper runs; whether one had to be started."""
        if self._reaper is not None and self._reaper.poll() is None:
            return False
        reaper_process = subprocess.Popen(  # cleans up even when this process is killed
            [sys.executable, "-I", reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert reaper_process.stdin is not None
        reaper_process.stdin.write(f"{self.shm_prefix}\n".encode())
        reaper_process.stdin.flush()
        self._reaper = reaper_process
        return True

    def start(self) -> None:
        """Starts the process; its log goes on where the last one's ended."""
        self._stubs = {}
        self._said = Said(self.log, "triton")
        with self._said.end() as log:
            self.process = subprocess.Popen(
                command(self._binary, self.repository, self.ports, self.shm_prefix, self.security),
                env=environment(self._binary)
                | self._variables
                | {
                    internal.KEY: internal.new_key(),
                    internal.GATEWAY_KEY: self.security.client_key,
                    internal.RUNTIME: str(self._runtime),
                    FORM: "json",  # which the log reads
                },
                cwd=self._directory,
                umask=0o077,  # its shared memory holds prompts
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us; we tell the server
            )

    def wait_ready(
        self, give_up: threading.Event | None = None, say: Callable[[str], None] = lambda line: None
    ) -> bool:
        """Waits until all models are ready and a first request was served.

        It is served when the costs of rounds are known, which no user then waits for.
        A server of which something crashes before that is started again, twice at most. `say` is
        told. False when `give_up` was set before that; raises `ServerError` when it cannot be.
        """
        give_up = give_up or threading.Event()
        begun = started = time.monotonic()
        crashes = 0
        while time.monotonic() - begun < START_TIMEOUT:
            if (problem := self._failed_start(started)) is not None:
                crashes += 1
                if crashes > START_CRASHES:
                    raise ServerError(f"{problem} while it started, again and again", self._look())
                say(f"{problem} while it started; starting it again")
                self.kill()
                self.start()
                started = time.monotonic()
            elif self.health.is_ready():
                status = self.health.probe(FIRST_TIMEOUT)
                answered = status in (200, 503)  # served, or others filled the queue already
                if answered and self.ended() is None and not self._missing():
                    return True
                if status is not None and not answered:
                    raise ServerError(f"the first request got HTTP {status}", self._look())
            if give_up.wait(0.1):
                return False
        raise ServerError(f"the server was not ready after {START_TIMEOUT:.0f} s", self._look())

    def ended(self) -> str | None:
        """What of the server has ended since it was started; None: nothing that was seen running.

        Its own readiness does not change when a model process ends.
        """
        if (code := self.process.poll()) is not None:
            return f"tritonserver ended (exit {code})"
        for pid, model in self._stubs.items():
            with suppress(OSError):  # a lack of files here ends nothing there
                # a process id may have a new owner
                if not any(self.shm_prefix in word for word in command_line(pid)):
                    return f"the process of {model} ended (pid {pid})"
        return None

    def _missing(self) -> set[str]:
        """The models that have had no process yet."""
        missing = self.models - set(self._stubs.values())
        if missing:
            self._stubs |= self.stubs()
        return missing

    def _failed_start(self, started: float) -> str | None:
        """What crashed since `started`; ServerError for what would never start."""
        missing = self._missing()
        took = time.monotonic() - started
        if missing and took > STUB_TIMEOUT:
            return f"the process of {min(missing)} is not there"
        if took > self._load_timeout and not self.health.is_ready():
            return f"its models were not loaded in {self._load_timeout:.0f} s"
        if (problem := self.ended()) is None:
            return None
        with suppress(subprocess.TimeoutExpired):  # of a model that does not load both end
            self.process.wait(EXIT_AFTER)
        code = self.process.poll()
        if code is None:
            return problem
        reason = _reason(self._said.last())
        if code < 0 or KILLED in reason:
            return f"tritonserver ended (exit {code})" if code < 0 else problem
        raise ServerError(f"tritonserver ended (exit {code}): {reason}", self._look())

    def stubs(self) -> dict[int, str]:
        """The server's model processes: process id to model."""
        words = {pid: command_line(pid) for pid in processes_naming(self.shm_prefix)}
        return {
            pid: Path(line[1]).parent.parent.name  # MODEL/1/model.py
            for pid, line in words.items()
            if line and line[0].endswith("triton_python_backend_stub")
        }

    @contextmanager
    def reloading(self, model: str) -> Iterator[None]:
        """Within the block the process of a model may end, because another one takes its place."""
        old = {pid: name for pid, name in self._stubs.items() if name == model}
        self._stubs = {pid: name for pid, name in self._stubs.items() if name != model}
        try:
            yield
        finally:
            deadline = time.monotonic() + STUB_TIMEOUT  # until the old ones have ended
            while len(new := [pid for pid, name in self.stubs().items() if name == model]) > 1:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            self._stubs |= dict.fromkeys(new, model) or old

    def load_drafter(self, build: Path) -> None:
        """That of another build in place of the one that runs; ServerError where it stays.

        Triton loads it beside the old one, whose process ends when its last round has. What it
        needs of texts that run or are kept it has not seen: they go on without.
        """
        config = self.health.config(DRAFTER)
        held = self.control.ask("hold")
        try:
            reason = "the server does not answer"
            if config is not None and held is not None:
                engine = build / "engines" / "drafter"
                config["parameters"]["engine"]["string_value"] = str(engine)
                reason = self.health.load(DRAFTER, config, START_TIMEOUT) or ""
            if reason:
                raise ServerError(f"the drafter did not load: {reason}", self._look())
        finally:
            self.control.ask("release")

    def stop(self) -> None:
        """Stops the server and its model processes; bounded, whatever they are doing."""
        self.health.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT + 3)
        self.kill()

    def kill(self) -> None:
        """Ends everything at once; clients see their connections close."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it
            self.process.wait(KILL_TIMEOUT)
        clean_up(self.shm_prefix)

    def _look(self) -> str:
        return f"Read its log: {self.log.path}"


def find_repository(directory: Path) -> Path:
    """The model repository of a build; ServerError or EngineError when it cannot be served."""
    for repository in (directory / "model_repository", directory):
        if (repository / "dflash" / "config.pbtxt").is_file():
            repository = repository.resolve()
            for engine in filter(Path.is_dir, roles(repository.parent / "engines")):
                kind = engine_kind(engine)  # what is wrong is said before Triton runs
                for rank in range(read_info(engine, kind).ranks):
                    info = read_info(rank_directory(engine, rank), kind)
                    if info.plan is not None:
                        check_machine(info)
            return repository
    raise ServerError(
        f"{directory} is not a directory that `dflash-trt build` made",
        "Build one: dflash-trt build build_configs/pycode.yaml --output DIR",
    )


def _variables(repository: Path) -> dict[str, str]:
    """What the engine wants in its environment."""
    engine = repository.parent / "engines" / tensorrt_llm.KIND
    made = (engine / ENGINE_FILE).is_file()
    return tensorrt_llm.read_info(engine).environment if made else {}


def _reason(lines: list[str]) -> str:
    """Those of a server's last lines that say why it ended."""
    # a Python model's exception: the message, then a traceback on the same line
    load = r"failed to load '([^']+)' version \d+: (.+?)(?:\\n|\"?$)"
    failed = re.findall(load, "\n".join(lines), re.M)
    if failed:
        return "; ".join(f"model {name} did not load: {why}" for name, why in failed)
    errors = [
        line
        for line in lines
        if re.match(r"E\d{4} (?!.*CUDA|.*Cuda)", line) or line.startswith("error:")
    ]
    return " | ".join((errors or lines)[-5:]) or "it said nothing"
