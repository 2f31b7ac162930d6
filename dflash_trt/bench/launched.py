"""A bundle's server, started as its container starts it: `launch/mpi.sh`, a task for each GPU.

A Triton that starts by itself would have TensorRT-LLM spawn its ranks, which MPI may refuse.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_trt.errors import ServerError
from dflash_trt.serving.health import health_of
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.security import Security

PROGRAMS = ("mpirun", "trtllm-llmapi-launch", "tritonserver")
START, STOP = 3600.0, 60.0  # seconds at most: it loads, tunes and captures graphs
POLL = 0.5


def can_launch() -> bool:
    """Whether this machine or container has what it takes."""
    return all(map(shutil.which, PROGRAMS))


@contextmanager
def launched(build: Path) -> Iterator[Ports]:
    """A ready server on free ports, for as long as the block lasts.

    Raises ServerError naming its log, which stays, when it does not become ready.
    """
    ports = free_ports()
    options = [f"--{kind}-port={port}" for kind, port in vars(ports).items()]
    given = {"TRITON_ARGS": " ".join([os.environ.get("TRITON_ARGS", ""), *options])}
    handle, log = tempfile.mkstemp(prefix="dflash-trt-launch-", suffix=".log")
    process = subprocess.Popen(
        [build / "launch" / "mpi.sh"],
        env=os.environ | given,
        stdin=subprocess.DEVNULL,
        stdout=handle,
        stderr=handle,
        start_new_session=True,  # its tasks are processes, too
    )
    os.close(handle)
    try:
        _wait_ready(process, ports, Path(log))
        yield ports
    finally:
        process.terminate()  # the tasks pass it on to Triton
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    Path(log).unlink()


def _wait_ready(process: "subprocess.Popen[bytes]", ports: Ports, log: Path) -> None:
    health, deadline = health_of(ports, Security()), time.monotonic() + START
    while not health.is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerError(
                "launch/mpi.sh ended before its server was ready"
                if process.poll() is not None
                else f"launch/mpi.sh had no ready server after {START:.0f} s",
                f"Read its log: {log}",
            )
        time.sleep(POLL)
