"""`dflash-trt` in this process, as a shell would see it, and programs in their own."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from dflash_trt.cli.main import main


def program(
    *words: object, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, words)),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run(*arguments: object) -> Ran:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["dflash-trt", *map(str, arguments)])
        code = main()
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Ran(code, *said)
