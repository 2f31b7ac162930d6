"""The ranks of TensorRT-LLM: an MPI job, a process for each GPU, that serves one Triton.

`trtllm-llmapi-launch` runs in each process that `mpirun` starts. In the first it prepares an
environment by which an `LLM` finds the ranks, and runs a task in it. The task here is only to hand
that environment to `serve`, whose Triton gets it, and to wait until Triton has ended: mpirun kills
its processes 0.02 s after a signal (open-mpi/ompi#12149), and Triton is none of them.

On several machines Slurm starts the launcher, and the launcher starts `serve`, as its task: then
the environment is there, and the ranks live as long as `serve` does.
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from dflash_trt.errors import ServerError
from dflash_trt.serving.log import Log
from dflash_trt.serving.model.llm import MPI_JOB
from dflash_trt.serving.processes import die_with_parent
from dflash_trt.serving.supervisor.children import (
    Child,
    command_line,
    hold,
    kill_session,
    parent_of,
)

MPIRUN = "mpirun"
LAUNCHER = "trtllm-llmapi-launch"
LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"  # the launcher sets it to 1 for its task
START_TIMEOUT = 60.0  # seconds; nothing is loaded yet
STOP_TIMEOUT = 5.0  # seconds for the ranks to end after Triton
KILL_TIMEOUT = 5.0
# variables of a job around `serve`, of which mpirun would take its slots
OUTER_JOB = re.compile(f"SLURM_|{MPI_JOB.pattern}")
# as in TensorRT-LLM's triton_backend/scripts/triton_task.sh
SETTINGS = {"PMIX_MCA_gds": "hash", "UCX_UD_TIMEOUT": "120s"}
TMPDIR = "PRTE_MCA_prte_tmpdir_base"  # a job that is killed leaves files there
# the launcher splits its task at spaces, and goes on only if it ends with 0
TASK = ["sh", "task"]
TASK_SCRIPT = """
env --unset=BASH_XTRACEFD --null > environment.new
mv environment.new environment
exec cat end
"""
# the launcher traces itself, with the key of the ranks: not into the log
UNTRACED = ["sh", "-c", 'BASH_XTRACEFD=9 exec "$@" 9>/dev/null', "rank"]


def is_launched() -> bool:
    """Return whether the launcher started this process, as on several machines."""
    return os.environ.get(LAUNCHED) == "1"


@contextmanager
def end_job_on_failure() -> Iterator[None]:
    """End a launcher whose task fails: it would wait for its ranks forever."""
    try:
        yield
    except BaseException:
        if is_launched():
            atexit.register(_end_launcher)  # the error is printed first
        raise


def _end_launcher() -> None:
    launcher, ancestor = None, parent_of(os.getpid())
    while ancestor:
        if any(word.endswith(LAUNCHER) for word in command_line(ancestor)):
            launcher = ancestor
        ancestor = parent_of(ancestor)
    if launcher is not None:
        os.kill(launcher, signal.SIGTERM)


def check_programs() -> None:
    """Raise ServerError if this machine cannot start ranks."""
    for program in (MPIRUN, LAUNCHER):
        if shutil.which(program) is None:
            raise ServerError(
                f"there is no {program} on PATH, which starts TensorRT-LLM's ranks",
                "Serve the build in the image of its deploy/Dockerfile",
            )


class Ranks:
    """The job of one machine; `start` starts it again after `kill`.

    Use it in a thread that lives as long as the job, which ends with it.
    """

    def __init__(self, runtime: Path, count: int, variables: Mapping[str, str]) -> None:
        """runtime: a directory of this user alone; variables: for all ranks."""
        self._folder = runtime / "ranks"
        self._variables = variables
        self._command = [
            MPIRUN,
            *("-np", str(count), "--host", f"localhost:{count}"),
            "--bind-to",
            "none",  # TensorRT-LLM binds its ranks by the GPUs' NUMA nodes
            "--allow-run-as-root",
            *(*UNTRACED, LAUNCHER, *TASK),
        ]
        self._job: subprocess.Popen[bytes] | None = None
        self._mpirun: Child | None = None
        self._end = ExitStack()  # closing it ends the task

    def start(self, log: Log) -> dict[str, str]:
        """Start the job; return Triton's environment. ServerError if it does not start."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / "task").write_text(TASK_SCRIPT)
        end = self._folder / "end"
        os.mkfifo(end)
        self._end.callback(os.close, os.open(end, os.O_RDWR))
        surrounding = {
            name: value for name, value in os.environ.items() if not OUTER_JOB.match(name)
        }
        with log.own_writer() as output:
            self._job = subprocess.Popen(
                self._command,
                env={**surrounding, **SETTINGS, TMPDIR: str(self._folder), **self._variables},
                cwd=self._folder,
                umask=0o077,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # in which all of its processes stay
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # which it passes on
            )
        self._mpirun = hold(self._job.pid, MPIRUN, os.getpid())
        deadline = time.monotonic() + START_TIMEOUT
        while not (self._folder / "environment").exists():
            if self.has_ended or time.monotonic() > deadline:
                self.kill()
                raise ServerError("TensorRT-LLM's ranks did not start", f"Read its log: {log.path}")
            time.sleep(0.01)
        return self._environment()

    @property
    def has_ended(self) -> bool:
        return self._mpirun is None or self._mpirun.has_ended

    def stop(self) -> None:
        """End the job after Triton; takes bounded time."""
        self._end.close()
        deadline = time.monotonic() + STOP_TIMEOUT
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End the job at once."""
        self._end.close()
        if self._job is not None:
            kill_session(self._job.pid, KILL_TIMEOUT)
            with suppress(subprocess.TimeoutExpired):
                self._job.wait(KILL_TIMEOUT)
        if self._mpirun is not None:
            self._mpirun.close()
        self._job = self._mpirun = None

    def _environment(self) -> dict[str, str]:
        entries = (self._folder / "environment").read_bytes().split(b"\0")
        return dict(os.fsdecode(entry).split("=", 1) for entry in entries if entry)
