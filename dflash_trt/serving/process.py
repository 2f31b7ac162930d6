"""A tritonserver process: start it, wait until it is ready, stop it whatever state it is in."""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from contextlib import suppress
from pathlib import Path

from dflash_trt.errors import ServerError
from dflash_trt.serving.launch import (
    EXIT_TIMEOUT,
    HOST,
    Ports,
    command,
    environment,
    find_binary,
    working_directory,
)

START_TIMEOUT = 600.0  # seconds: a large model may take minutes to load
KILL_TIMEOUT = 5.0  # seconds
SHARED_MEMORY = Path("/dev/shm")


class Server:
    """One tritonserver process over a built directory, with its log and its runtime directory."""

    def __init__(self, directory: Path, ports: Ports) -> None:
        self.ports = ports
        self.repository = _repository(directory)
        _check_ports(ports)
        self._runtime = Path(tempfile.mkdtemp(prefix="dflash-trt-"))
        self.log = self._runtime / "server.log"
        self.shm_prefix = f"dflash_trt_{uuid.uuid4().hex[:12]}_"

    def __enter__(self) -> "Server":
        try:
            binary = find_binary(self._runtime)
        except ServerError:
            shutil.rmtree(self._runtime)
            raise
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command(binary, self.repository, self.ports, self.shm_prefix),
                env=environment(binary),
                cwd=working_directory(self._runtime),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us; we tell the server
            )
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self.stop()
        if isinstance(error, ServerError):  # keep the log that the error names
            return
        shutil.rmtree(self._runtime, ignore_errors=True)

    def wait_ready(self, give_up: threading.Event | None = None) -> bool:
        """Waits until all models are ready; False when `give_up` was set before that."""
        give_up = give_up or threading.Event()
        deadline = time.monotonic() + START_TIMEOUT
        url = f"http://{HOST}:{self.ports.http}/v2/health/ready"
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return True
            except (urllib.error.URLError, OSError):
                if give_up.wait(0.1):
                    return False
        raise ServerError(f"the server was not ready after {START_TIMEOUT:.0f} s", self._look())

    def check_alive(self) -> None:
        """Raises `ServerError` with the server's own last words when its process has ended."""
        code = self.process.poll()
        if code is not None:
            log = self.log.read_text(errors="replace")
            raise ServerError(f"tritonserver ended (exit {code}): {_reason(log)}", self._look())

    def stop(self) -> None:
        """Stops the server and its model processes; bounded, whatever they are doing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(EXIT_TIMEOUT + 3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # model processes that outlived it; killing one takes the system a moment
        deadline = time.monotonic() + KILL_TIMEOUT
        while (pids := _processes_naming(self.shm_prefix)) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for region in SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            region.unlink(missing_ok=True)

    def _look(self) -> str:
        return f"Read its log: {self.log}"


def _repository(directory: Path) -> Path:
    for repository in (directory / "model_repository", directory):
        if (repository / "dflash" / "config.pbtxt").is_file():
            return repository.resolve()
    raise ServerError(
        f"{directory} is not a directory that `dflash-trt build` made",
        "Build one: dflash-trt build build_configs/pycode.yaml --output DIR",
    )


def _check_ports(ports: Ports) -> None:
    taken: list[int] = []
    for kind, port in (("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except (OSError, OverflowError):
                usable = False
            else:
                usable = port not in taken
        if not usable:
            raise ServerError(
                f"port {port} ({kind}) is in use or may not be used",
                f"Stop what listens on it, or give another: --{kind}-port PORT",
            )
        taken.append(port)


def _reason(log: str) -> str:
    """The lines of a server log that say why it ended."""
    lines = log.splitlines()
    # a Python model's exception: the message, then a traceback on the same line
    failed = re.findall(r"failed to load '([^']+)' version \d+: (.+?)(?:\\n|\"?$)", log, re.M)
    if failed:
        return "; ".join(f"model {name} did not load: {why}" for name, why in failed)
    errors = [line for line in lines if re.match(r"E\d{4} ", line) or line.startswith("error:")]
    return " | ".join((errors or lines)[-5:]) or "it said nothing"


def _processes_naming(text: str) -> list[int]:
    """Processes with `text` in their command line; Linux only, as the server is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found
