"""A module of this package in a Python process of its own, Triton's Python models included."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import dflash_trt


def start_module(
    name: str,
    *arguments: object,
    fds: tuple[int, ...],
    environment: Mapping[str, str] = os.environ,
) -> "subprocess.Popen[bytes]":
    """`python -m NAME ARGUMENTS`, which also gets the file descriptors `fds`."""
    # inside Triton `sys.executable` is not Python; the launcher puts its Python first on PATH
    python = sys.executable if "python" in Path(sys.executable).name else shutil.which("python3")
    package = str(Path(dflash_trt.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [python or "python3", "-m", name, *map(str, arguments)],
        # safe path: no module comes from the folder that somebody happens to be in
        env={**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the process that starts it
    )
