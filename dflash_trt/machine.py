"""The machine that this runs on, and what is installed: a timing means nothing without them."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dflash_trt

PACKAGES = ("onnxruntime", "numpy", "tokenizers", "tritonclient", "nvidia-pytriton")


def machine() -> dict[str, Any]:
    """CPU, memory, system and load of this machine."""
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
    """As Linux names it; elsewhere what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """How many this process may run on: a container or `taskset` may give it fewer than all."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    found = {"dflash-trt": dflash_trt.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
