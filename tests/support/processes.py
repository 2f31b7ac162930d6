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


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def status_of(pid: int) -> dict[str, str]:
    """Return what /proc/PID/status says; nothing of a process that has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return {} if status["State"].startswith("Z") else status
    return {}


def tree(root: int) -> set[int]:
    """Return a process and those that come from it and run."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    parents = {pid: int(status["PPid"]) for pid in pids if (status := status_of(pid))}
    members = {root} & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    return members
