"""The gateway's process as `serve` sees it."""

import importlib.util
import os
import select
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from dflash_trt.build import read_manifest
from dflash_trt.errors import ServerError
from dflash_trt.serving.gateway import LEFT, LISTENING, REFUSED, Settings, codec
from dflash_trt.serving.log import FORM, Log, Said
from dflash_trt.serving.ports import LOOPBACK, Ports, listen
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.reaper import KILL_TIMEOUT

START_TIMEOUT = 60.0  # seconds
START_CRASHES = 2
EXIT_TIME = 1.0  # seconds from the end of its output to that of the process
STOP_TIMEOUT = 10.0  # seconds


class Gateway:
    """Listens on the ports of clients from the start on; `start` starts its process, anew if it
    died.

    ports, openai_port: where clients come (None: no OpenAI front); triton: where Triton is;
    page: whether the OpenAI front has one.
    Raises ServerError when a port is taken or the OpenAI front cannot be, BuildError when
    `directory` is no build.
    """

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        triton: Ports,
        security: Security,
        openai_port: int | None = None,
        *,
        page: bool = True,
    ) -> None:
        addresses = {
            "http": (security.http_host, ports.http),
            "grpc": (security.host, ports.grpc),
            "metrics": (security.host, ports.metrics),
        }
        if openai_port is not None:
            _check_openai(directory, security)
            addresses["openai"] = LOOPBACK, openai_port
        self._process: subprocess.Popen[bytes] | None = None
        self._moved: subprocess.Popen[bytes] | None = None  # who has been told of the last move
        self._state = "unready"
        with ExitStack() as stack:  # the ports are ours from here on
            listeners = {
                name: stack.enter_context(listen(name, *address)).fileno()
                for name, address in addresses.items()
            }
            self._listening = stack.pop_all()
        self._settings = Settings(listeners, directory, triton, security, page)

    def start(self, log: Log) -> None:
        """Returns when it answers; it is ready once it is, or was, told so.

        It is started again when it is killed before that, twice at most. Raises ServerError when it
        does not start, with its last words, which are in `log`.
        """
        for _ in range(1 + START_CRASHES):
            said = Said(log, "gateway")
            process = self._launch(said)
            if _answer(process, START_TIMEOUT) == LISTENING:
                return self._write(self._state)
            if not self.wait(EXIT_TIME) or process.returncode >= 0:
                process.kill()
                break
        reason = next(reversed(said.last()), "it said nothing")
        raise ServerError(f"the gateway did not start: {reason}", f"Read its log: {log.path}")

    def _launch(self, said: Said) -> "subprocess.Popen[bytes]":
        with said.end() as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dflash_trt.serving.gateway"],
                # nothing from the working directory, and lines that the log reads
                env=os.environ | {"PYTHONSAFEPATH": "1", FORM: "json"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,  # `select` sees every line
                pass_fds=list(self._settings.listeners.values()),
                start_new_session=True,  # Ctrl-C reaches us; we tell it
            )
        self._write(codec.dump_json(self._settings).decode())  # keys: never among the arguments
        return self._process

    def poll(self) -> int | None:
        """The exit code of the process when it has ended."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def tell(self, words: str) -> None:
        """`ready`, `unready`, `drain SECONDS`: takes requests, or none, or ends when none runs."""
        self._state = words
        self._write(words)

    def move(self, directory: Path, triton: Ports) -> None:
        """New requests go to this Triton, over this build; those that run stay where they are.

        ServerError when they cannot, and then nothing has changed. A process that died meanwhile
        goes there when it is started.
        """
        assert self._process is not None
        settings, self._moved = replace(self._settings, directory=directory, triton=triton), None
        self._write(f"move {codec.dump_json(settings).decode()}")
        answer: str | None = LEFT
        while answer == LEFT:  # of another move: its clients were not waited for
            answer = _answer(self._process, START_TIMEOUT)
        if answer is None or answer.startswith(REFUSED):
            reason = "it does not answer" if answer is None else answer.removeprefix(REFUSED)
            raise ServerError(f"the gateway cannot go there: {reason.strip()}", "Try it again")
        self._settings, self._moved = settings, self._process

    def left(self, timeout: float) -> bool:
        """Whether nobody is left where requests went before the last move; waits `timeout` s."""
        return self._moved is None or _answer(self._moved, timeout) is not None

    def _write(self, words: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # `poll` says it
            self._process.stdin.write(f"{words}\n".encode())

    def wait(self, timeout: float) -> bool:
        """Whether the process has ended within `timeout` seconds."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.poll() is not None

    def stop(self) -> None:
        """Ends the process, running requests too, and gives the ports back; bounded."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            if not self.wait(STOP_TIMEOUT):
                self._process.kill()
                self.wait(KILL_TIMEOUT)
            self._process.stdout.close()
        self._listening.close()


def _answer(process: "subprocess.Popen[bytes]", timeout: float) -> str | None:
    """A line of it, empty when it has ended; None without one in so many seconds."""
    assert process.stdout is not None
    with suppress(OSError, ValueError):  # closed by `stop`
        readable, _, _ = select.select([process.stdout], [], [], timeout)
        return process.stdout.readline().decode().strip() if readable else None
    return ""


def _check_openai(directory: Path, security: Security) -> None:
    if importlib.util.find_spec("fastapi") is None:  # found, not imported
        raise ServerError(
            "--openai-port needs the Python package fastapi",
            "Run: pip install 'dflash-trt[openai]'",
        )
    if security.tls and security.tls.ca:
        raise ServerError(
            "--openai-port does not go with --grpc-ca: the front has no certificate to show",
            "Leave out one of the two",
        )
    read_manifest(directory)
