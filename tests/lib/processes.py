"""What the processes of a server hold: memory, files, threads and shared memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from dflash_trt.serving.server.process import SHARED_MEMORY, command_line


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])
    return 0


def family(pid: int) -> set[int]:
    """A process, its children, theirs and so on."""
    everyone = {int(name): parent_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found, more = {pid}, {pid}
    while more:
        more = {child for child, parent in everyone.items() if parent in more} - found
        found |= more
    return found


def private(pid: int) -> int:
    """Bytes of memory that no other process has: shares change with others; none when it ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def name_of(pid: int) -> str:
    """What a process of `serve` is: a model by its name, or its program."""
    words = " ".join(command_line(pid))
    if found := re.search(r"/(\w+)/1/model\.py|-m dflash_trt\.(?:\w+\.)*(\w+)|(reaper)\.py", words):
        return str(found[found.lastindex or 0])
    return "tritonserver" if "--model-repository=" in words else "serve"


def prefixes_of(pids: set[int]) -> set[str]:
    """How the names of their shared memory begin."""
    words = " ".join(word for pid in pids for word in command_line(pid))
    return set(re.findall(r"dflash_trt_\w{12}_", words))


def shared_memory(names: set[str]) -> int:
    """Bytes in use under names that begin so."""
    total = 0
    for name in names:
        for region in SHARED_MEMORY.glob(f"{name}*"):
            with suppress(OSError):
                total += region.stat().st_blocks * 512
    return total


def files_and_threads(pid: int) -> tuple[int, int]:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    return 0, 0
