"""The machine and installed packages, which timings depend on."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dflash_trt

PACKAGES = ("onnxruntime", "numpy", "tokenizers", "tritonclient", "nvidia-pytriton")


def this_machine() -> dict[str, Any]:
    memory, meminfo = 0, Path("/proc/meminfo")
    if meminfo.exists():
        memory = int(meminfo.read_text().split()[1]) * 1024
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory": memory,
        "system": platform.platform(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, at least 1: by `taskset` or container (cgroup 2).

    A container's CPU time is rounded down to whole cores. Hyperthreads of a core count as one, like
    ONNX Runtime's default number of threads. root: the directory of /proc and /sys.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    cores, cpus = set(), os.sched_getaffinity(0)
    for cpu in cpus:
        alike = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(alike.read_text() if alike.exists() else str(cpu))
    given = [len(cores)]
    for group in _cgroups(root):
        with suppress(OSError, ValueError):  # ValueError: "max" means no limit
            # microseconds of CPU time per period, and the period
            quota, period = map(int, (group / "cpu.max").read_text().split())
            given.append(quota // period)
    return max(1, min(given))


def container_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs of this container (cgroup 2), else of the machine, whatever binds processes.

    root: the directory of /proc and /sys.
    """
    for group in _cgroups(root):
        with suppress(OSError, ValueError):
            ranges = (group / "cpuset.cpus.effective").read_text().strip().split(",")
            bounds = [part.partition("-") for part in ranges]
            return sum(int(last or first) - int(first) + 1 for first, _, last in bounds)
    return os.cpu_count() or 1


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes free for this process: of the machine, or of a limited container (cgroup 2).

    File caches count as free. root: the directory of /proc and /sys.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():  # not Linux: all memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) * 1024]
    for group in _cgroups(root):
        with suppress(OSError, ValueError, KeyError):  # ValueError: "max" means no limit
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            held = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
            free.append(int((group / "memory.max").read_text()) - held)
    return max(0, min(free))


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield this process's cgroup and its parents; a container hides some."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            path = Path(line.rpartition(":")[2].lstrip("/"))
            yield from (root / "sys/fs/cgroup" / group for group in (path, *path.parents))


def versions() -> dict[str, str]:
    versions = {"dflash-trt": dflash_trt.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
