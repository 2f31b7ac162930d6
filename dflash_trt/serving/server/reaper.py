"""Ends what a tritonserver leaves behind: its model processes and its shared memory.

As a program it waits until its parent is gone, even by kill -9, and then
cleans up. It runs alone, isolated, so it may import the standard library only.
"""

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

KILL_TIMEOUT = 5.0  # seconds: killing a process takes the system a moment
SHARED_MEMORY = Path("/dev/shm")


def clean_up(shm_prefix: str) -> None:
    """Kills the processes that name `shm_prefix`, removes the regions that start with it."""
    if not re.fullmatch(r"dflash_trt_\w{12}_", shm_prefix):  # else it might match anything
        raise ValueError(f"not a prefix of shared memory: {shm_prefix!r}")
    deadline = time.monotonic() + KILL_TIMEOUT
    while (pids := processes_naming(shm_prefix)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for region in SHARED_MEMORY.glob(f"{shm_prefix}*"):
        region.unlink(missing_ok=True)


def processes_naming(text: str) -> list[int]:
    """Living processes with `text` in their command line; Linux only, as the server is."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):  # another user's, where those are hidden
            if text in " ".join(command_line(pid)):
                found.append(pid)
    return found


def command_line(pid: int) -> list[str]:
    """The words of a process's command line; none when it has ended, as a zombie too.

    OSError when nothing can be said of it, as without a file descriptor left.
    """
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def main() -> None:
    shm_prefix = sys.stdin.readline().strip()
    sys.stdin.read()  # ends when the other end of the pipe is closed
    clean_up(shm_prefix)


if __name__ == "__main__":
    main()
