"""A tritonserver process: start it, wait until it is ready, and always stop it."""

import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from dflash_trt import tensorrt_llm
from dflash_trt.builder.manifest import SHORT
from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.engines import ENGINE_FILE, check_machine, read_info, role_directories
from dflash_trt.errors import ServerError
from dflash_trt.files import size_of
from dflash_trt.serving.channel import RUNTIME, load_drafter, new_runtime, send_command
from dflash_trt.serving.keys import (
    CLIENT_KEY_VARIABLE,
    INTERNAL_KEY,
    new_key,
)
from dflash_trt.serving.log import Log, LogFormat
from dflash_trt.serving.ports import Ports, listen
from dflash_trt.serving.processes import die_with_parent
from dflash_trt.serving.security import Security, refuse_exposed_old_server
from dflash_trt.serving.supervisor.children import Children, models_of
from dflash_trt.serving.supervisor.clients import OK, UNAVAILABLE, TritonClient
from dflash_trt.serving.supervisor.diagnosis import KILLED, why_it_ended
from dflash_trt.serving.supervisor.launch import (
    EXIT_TIMEOUT,
    FEW_HEAPS,
    command,
    environment,
    find_binary,
    working_directory,
)
from dflash_trt.serving.supervisor.leftovers import (
    LOG,
    claim,
    clear,
    end_processes,
    environments,
    note_environments,
    remove_environments,
    remove_leftovers,
    remove_regions,
)
from dflash_trt.serving.supervisor.ranks import Ranks, check_programs, is_launched

START_TIMEOUT = 3600.0  # seconds: TensorRT-LLM loads, tunes and captures graphs
START_CRASHES = 2
LOAD_TIMEOUT, LOADED = 120.0, 5e6  # seconds to load engines; bytes loaded in one more second
EXIT_AFTER = 10.0  # seconds until Triton ends after a model failed to load
STUB_TIMEOUT = 60.0  # seconds until each model has a process
FIRST_TIMEOUT = 2.0  # seconds per attempt, so that Ctrl-C is noticed
STOP_TIMEOUT = EXIT_TIMEOUT + 3.0  # seconds
KILL_TIMEOUT = 5.0  # killing a process takes the system a moment

Say = Callable[[str], None]
Probe = Callable[[float], int | None]  # timeout in seconds to an HTTP status, None without answer


class Server:
    """A tritonserver over a build, with its log and runtime directory.

    As a context manager it runs during the block; `start` restarts it after `kill`. Use both in a
    thread that lives as long as the server, which ends with it. log: a file in an existing folder;
    None: one in the runtime directory, kept if `keep_log` or a ServerError names it.
    """

    def __init__(
        self,
        build: OpenedBuild,
        ports: Ports,
        security: Security | None = None,
        log: Path | None = None,
        log_format: LogFormat = "text",
        *,
        keep_log: bool = False,
    ) -> None:
        self.ports = ports
        self.security = security or Security()
        self.build = build
        repository = find_repository(build.directory)
        self.models = {path.parents[1].name for path in repository.glob("*/1/model.py")}
        engines = build.directory / "engines"
        size = sum(map(size_of, role_directories(engines)))
        # TensorRT-LLM, without engines of ours, tunes what it has loaded
        self._load_timeout = LOAD_TIMEOUT + size / LOADED if size else START_TIMEOUT
        bundle = engines / tensorrt_llm.KIND
        has_bundle = (bundle / ENGINE_FILE).is_file()
        info = tensorrt_llm.read_info(bundle) if has_bundle else None
        self._variables = info.environment if info else {}
        self.triton = TritonClient(ports, self.security)
        listen("grpc", self.security.host, ports.grpc).close()
        self._runtime = new_runtime()
        self._ranks: Ranks | None = None
        if info and not is_launched():
            self._ranks = Ranks(self._runtime, info.gpus, self._variables)
        self._keep_log = keep_log
        try:
            file = log or self._runtime / LOG
            self.log = Log(file, log_format, build.digest[:SHORT])
        except ServerError:
            shutil.rmtree(self._runtime)
            raise
        self.send_command = partial(send_command, self._runtime)
        self.shm_prefix = f"dflash_trt_{uuid.uuid4().hex[:12]}_"
        self._lock = claim(self._runtime, self.shm_prefix)
        self._environments: set[str] = set()  # of others, when Triton was started
        self._children = Children()  # the model processes seen since the start
        self.loads_drafter = False  # meanwhile no round runs

    def __enter__(self) -> "Server":
        try:
            self._binary = find_binary(self._runtime)
            refuse_exposed_old_server(self.security, self._binary.path)
            if self._ranks:
                check_programs()
        except ServerError:
            shutil.rmtree(self._runtime)
            os.close(self._lock)
            raise
        remove_leftovers()
        self._directory = working_directory(self._runtime)
        self.start()
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self.stop()
        self.log.flush()
        if not self._keep_log:
            self.log.close()
        keep_log = self._keep_log or isinstance(error, ServerError)
        clear(self._runtime, keep=self.log.path if keep_log else None)
        os.close(self._lock)

    def start(self) -> None:
        """Start Triton over the build; BuildError if that has changed since it was opened."""
        self.build.check_unchanged()
        self._children.forget()
        self._log_start = self.log.count()
        self._environments = environments()
        surrounding = self._ranks.start(self.log) if self._ranks else FEW_HEAPS | os.environ
        self.process = subprocess.Popen(
            command(self._binary, self._repository(), self.ports, self.shm_prefix, self.security),
            env=environment(self._binary, surrounding)
            | self._variables
            | self.log.environment
            | {
                INTERNAL_KEY: new_key(),
                CLIENT_KEY_VARIABLE: self.security.client_key,
                RUNTIME: str(self._runtime),
            },
            cwd=self._directory,
            umask=0o077,  # shared memory holds prompts
            stdin=subprocess.DEVNULL,
            stdout=self.log.fileno(),
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only us
            preexec_fn=die_with_parent,
        )

    def wait_ready(
        self,
        give_up: threading.Event | None = None,
        say: Say = lambda line: None,
        probe: Probe | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> bool:
        """Return True after a first request, which waits for the costs of rounds as no user should.

        False if `give_up` is set; ServerError for a server that cannot start, or crashes thrice;
        BuildError if the build changed meanwhile.
        probe: the way of that request; None: to Triton itself. look: is called meanwhile.
        """
        give_up = give_up or threading.Event()
        probe = probe or self.triton.probe
        begun = started = time.monotonic()
        crashes = 0
        while time.monotonic() - begun < START_TIMEOUT:
            if (problem := self._failed_start(started)) is not None:
                crashes += 1
                if crashes > START_CRASHES or is_launched():
                    times = "once" if crashes == 1 else f"{crashes} times"
                    raise ServerError(f"{problem} while it started, {times}", self._hint())
                say(f"{problem} while it started; starting it again")
                self.kill()
                self.start()
                started = time.monotonic()
            elif self.triton.is_ready():
                status = probe(FIRST_TIMEOUT)
                answered = status == OK or (status == UNAVAILABLE and self._has_requests())
                if answered and self.ended() is None and not self._models_without_process():
                    self.build.check_unchanged()  # what the models have loaded
                    return True
                if status not in (None, OK, UNAVAILABLE):
                    raise ServerError(f"the first request got HTTP {status}", self._hint())
            if give_up.wait(0.1):
                return False
            look()
        raise ServerError(f"the server was not ready after {START_TIMEOUT:.0f} s", self._hint())

    def _repository(self) -> Path:
        """Return the build's model repository, by a link if Triton takes no such path.

        With a space in it Triton would wait forever for its model processes.
        """
        repository = find_repository(self.build.directory)
        if not any(character.isspace() for character in str(repository)):
            return repository
        link = self._runtime / "build"
        link.unlink(missing_ok=True)
        link.symlink_to(self.build.directory)
        return link / repository.name

    def _has_requests(self) -> bool:
        """Return whether others' requests, over gRPC, may fill the queue."""
        status = self.send_command("status")
        return status is not None and status.open > 0

    def ended(self) -> str | None:
        """Return what has ended since the start, which Triton's own readiness does not tell."""
        if (code := self.process.poll()) is not None:
            return f"tritonserver ended (exit {code})"
        if (child := self._children.ended()) is not None:
            return f"the process of {child.model} ended (pid {child.pid})"
        if self._ranks and self._ranks.has_ended:
            return "a rank of TensorRT-LLM ended, and mpirun the others"
        return None

    def _models_without_process(self) -> set[str]:
        missing = self.models - self._children.models
        if missing:
            self._hold_children()
            note_environments(self._runtime, environments() - self._environments)
        return missing

    def _hold_children(self) -> None:
        self._children.hold(self.stubs(), self.process.pid)

    def _failed_start(self, started: float) -> str | None:
        """Return what crashed since `started`; ServerError if a restart would not help."""
        missing = self._models_without_process()
        took = time.monotonic() - started
        if missing and took > STUB_TIMEOUT:
            return f"the process of {min(missing)} is not there"
        if took > self._load_timeout and not self.triton.is_ready():
            return f"its models were not loaded in {self._load_timeout:.0f} s"
        if (problem := self.ended()) is None:
            return None
        with suppress(subprocess.TimeoutExpired):  # a model that fails to load ends both
            self.process.wait(EXIT_AFTER)
        code = self.process.poll()
        if code is None:
            return problem
        reason = why_it_ended(self.log.since(self._log_start))
        if code < 0 or KILLED in reason:
            return f"tritonserver ended (exit {code})" if code < 0 else problem
        raise ServerError(f"tritonserver ended (exit {code}): {reason}", self._hint())

    def stubs(self) -> dict[int, str]:
        """Return the model of each process that runs one now."""
        return models_of(self.process.pid)

    def load_drafter(self, build: Path) -> None:
        """Replace the running drafter by another build's; ServerError if that fails."""
        self.loads_drafter = True
        try:
            refusal = load_drafter(self._runtime, build / "engines" / "drafter", START_TIMEOUT)
        except (OSError, ValueError):
            refusal = "the server does not answer"
        finally:
            self.loads_drafter = False
        if refusal:
            raise ServerError(f"the drafter did not load: {refusal}", self._hint())

    def stop(self, seconds: float = STOP_TIMEOUT) -> None:
        """Stop the server and its model processes, at once after `seconds`."""
        self.triton.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if self._ranks and self.process.poll() is not None:
            self._ranks.stop()
        self.kill()

    def kill(self) -> None:
        """End everything at once; clients' connections close."""
        with suppress(OSError):
            self.process.send_signal(signal.SIGSTOP)  # it starts no other model meanwhile
            self._hold_children()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may block it
            self.process.wait(KILL_TIMEOUT)
        self._children.kill(KILL_TIMEOUT)
        if self._ranks:
            self._ranks.kill()
        end_processes(self._runtime)
        remove_regions(self.shm_prefix)
        remove_environments(self._runtime)

    def _hint(self) -> str:
        return f"Read its log: {self.log.path}"


def find_repository(directory: Path) -> Path:
    """Return a build's model repository; ServerError or EngineError if it cannot be served."""
    repository = (directory / "model_repository").resolve()
    if (repository / "dflash" / "config.pbtxt").is_file():
        for engine in filter(Path.is_dir, role_directories(repository.parent / "engines")):
            check_machine(read_info(engine))  # report problems before Triton runs
        return repository
    raise ServerError(
        f"{directory} is not a directory that `dflash-trt build` made",
        "Build one: dflash-trt build build_configs/pycode.yaml --output DIR",
    )
