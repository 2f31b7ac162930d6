"""The report of `make test-gpu` says on what it ran."""

import subprocess
from collections.abc import Callable
from importlib.metadata import distributions

import pytest

from dflash_trt.engines.tensorrt.library import compute_capabilities

PACKAGES = ("dflash-trt", "nvidia-", "onnx", "tensorrt", "torch")  # beginnings of their names
QUERY = "--query-gpu=name,driver_version,memory.total,power.limit"


@pytest.fixture(scope="session", autouse=True)
def machine(record_testsuite_property: Callable[[str, object], None]) -> None:
    found = compute_capabilities()
    if not found:
        pytest.exit("these tests need an NVIDIA GPU with its driver, and here is none", 1)
    query = ["nvidia-smi", QUERY, "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    for index, (capability, gpu) in enumerate(zip(found, gpus, strict=False)):
        record_testsuite_property(f"gpu {index}", f"{gpu.strip()}, compute capability {capability}")
    for package in distributions():
        if package.name.startswith(PACKAGES):
            record_testsuite_property(package.name, package.version)
