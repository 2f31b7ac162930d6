"""Processes of one server: they end with those that they belong to, and share with nobody else."""

import ctypes
import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path

LAST_WORDS = 0.2  # seconds for an answer to leave the process
PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this process signalled when its parent ends; call it in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_server() -> None:
    """End this model's process when its tritonserver is gone, even by kill -9.

    PR_SET_PDEATHSIG does not work: it follows the thread that started the process, which ends.
    """
    server = os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([server], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="server's end", daemon=True).start()


def end_process() -> None:
    """End this process with its dead engine once its answer is sent: `serve` restarts it."""
    threading.Timer(LAST_WORDS, os._exit, [1]).start()


def hide_shared_memory() -> None:
    """Restrict this process's shared memory to its user: Triton makes it 0644 in any umask."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, folder, name = line.partition("/dev/shm/")
        if folder:
            with suppress(FileNotFoundError, PermissionError):  # removed since, or another's
                Path(folder, name).chmod(0o600)
