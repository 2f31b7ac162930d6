"""A tritonserver process: start it, wait until it is ready, stop it whatever state it is in."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_trt import tensorrt_llm
from dflash_trt.engines import ENGINE_FILE, engine_kind, read_info, roles
from dflash_trt.engines.tensorrt.machine import check_machine
from dflash_trt.errors import ServerError
from dflash_trt.files import size_of
from dflash_trt.serving import internal
from dflash_trt.serving.front import Control
from dflash_trt.serving.health import health_of
from dflash_trt.serving.log import FORM, Form, Log
from dflash_trt.serving.ports import Ports, check_ports
from dflash_trt.serving.security import Security, check_exposure
from dflash_trt.serving.server.launch import (
    EXIT_TIMEOUT,
    command,
    environment,
    find_binary,
    working_directory,
)

START_TIMEOUT = 3600.0  # seconds: TensorRT-LLM loads, tunes and captures graphs
START_CRASHES = 2
LOAD_TIMEOUT, LOADED = 120.0, 5e6  # seconds until engines are loaded; bytes of them in one more
EXIT_AFTER = 10.0  # seconds in which Triton ends when a model did not load
STUB_TIMEOUT = 60.0  # seconds until each model has a process
FIRST_TIMEOUT = 2.0  # seconds until it is asked again, so that a Ctrl-C is heard
KILL_TIMEOUT = 5.0  # seconds: killing a process takes the system a moment
SHARED_MEMORY = Path("/dev/shm")
DRAFTER = "draft"  # the model
KILLED = "is not healthy"  # what Triton says of a model whose process was killed


class Server:
    """A tritonserver over a built directory, with its log and its runtime directory.

    As a context manager it runs for as long as the block; `start` starts it anew after `kill`.
    Both in a thread that lives as long as it: it ends with that. log: a file, whose folder exists;
    None: in the runtime directory, where it stays if `keep_log`, or if a ServerError names it.
    """

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        security: Security | None = None,
        log: Path | None = None,
        form: Form = "text",
        *,
        keep_log: bool = False,
    ) -> None:
        self.ports = ports
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
        self._variables = _variables(self.repository)
        self.health = health_of(ports, self.security)
        check_ports(ports, self.security.host)
        self._runtime = internal.new_runtime()
        self._keep_log = keep_log
        try:
            self.log = Log(log or self._runtime / "server.log", form)
        except ServerError:
            shutil.rmtree(self._runtime)
            raise
        self.control = Control(self._runtime / internal.SOCKET)
        remove_stale_memory()
        self.shm_prefix = f"{_memory_prefix()}{os.getpid()}_{uuid.uuid4().hex[:12]}_"
        self._stubs: dict[int, str] = {}  # the model processes seen since the start

    def __enter__(self) -> "Server":
        try:
            self._binary = find_binary(self._runtime)
            check_exposure(self.security, self._binary.path)
        except ServerError:
            shutil.rmtree(self._runtime)
            raise
        self._directory = working_directory(self._runtime)
        self.start()
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self.stop()
        if not self._keep_log:
            self.log.close()
        named = self._keep_log or isinstance(error, ServerError)
        for path in self._runtime.glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != self.log.path or not named:
                path.unlink()
        with suppress(OSError):  # the log is in there
            self._runtime.rmdir()

    def start(self) -> None:
        """Start the process; its log goes on where the last one's ended."""
        self._stubs = {}
        self._log_start = self.log.size()
        self.process = subprocess.Popen(
            command(self._binary, self.repository, self.ports, self.shm_prefix, self.security),
            env=environment(self._binary)
            | self._variables
            | {
                internal.KEY: internal.new_key(),
                internal.CLIENT_KEY_VARIABLE: self.security.client_key,
                internal.RUNTIME: str(self._runtime),
                internal.GRPC: self.security.for_models(self.ports.grpc),
                FORM: self.log.form,
            },
            cwd=self._directory,
            umask=0o077,  # its shared memory holds prompts
            stdin=subprocess.DEVNULL,
            stdout=self.log.fileno(),
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us; we tell the server
            preexec_fn=internal.die_with_parent,
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
        reason = _reason(self.log.since(self._log_start))
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


def clean_up(shm_prefix: str) -> None:
    """Kill the processes that name `shm_prefix`, remove the regions that start with it."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while (pids := processes_naming(shm_prefix)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for region in SHARED_MEMORY.glob(f"{shm_prefix}*"):
        region.unlink(missing_ok=True)


def remove_stale_memory() -> None:
    """Remove what servers left in shared memory whose `serve` was killed."""
    for region in SHARED_MEMORY.glob(f"{_memory_prefix()}*"):
        pid = region.name.removeprefix(_memory_prefix()).partition("_")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):  # removed meanwhile, or another user's
                region.unlink()


def _memory_prefix() -> str:
    """What names begin with; containers that share memory do not share process ids."""
    namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    return f"dflash_trt_{namespace}_"


def processes_naming(text: str) -> list[int]:
    """Return living processes with `text` in their command line; Linux only, as the server is."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):  # another user's, where those are hidden
            if text in " ".join(command_line(pid)):
                found.append(pid)
    return found


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; none when it has ended, as a zombie too.

    OSError when nothing can be said of it, as without a file descriptor left.
    """
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def find_repository(directory: Path) -> Path:
    """The model repository of a build; ServerError or EngineError when it cannot be served."""
    for repository in (directory / "model_repository", directory):
        if (repository / "dflash" / "config.pbtxt").is_file():
            repository = repository.resolve()
            for engine in filter(Path.is_dir, roles(repository.parent / "engines")):
                kind = engine_kind(engine)  # what is wrong is said before Triton runs
                info = read_info(engine, kind)
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
