"""Processes of this machine, by the words they were started with."""

from contextlib import suppress
from pathlib import Path


def processes_naming(text: str) -> list[int]:
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if text in " ".join(command_line(pid))]


def command_line(pid: int) -> list[str]:
    """Return a process's words; none if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []
