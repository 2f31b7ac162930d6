"""`dflash-trt` in this process, as a shell would see it."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from dflash_trt.cli.main import main


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
