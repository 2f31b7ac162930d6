"""Atomic directories: complete or absent, with one writer at a time."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.errors import BuildError


@contextmanager
def sole_writer(output: Path) -> Iterator[Path]:
    """Lock `output` and yield an empty directory beside it to build in; `publish` moves it in.

    Removes leftovers of killed builds first, and its own last. Raises BuildError if another process
    holds the lock.
    """
    scratch, aside = _beside(output, "building"), _beside(output, "replaced")
    with _locked(output):
        if aside.exists() and not output.exists():
            aside.rename(output)  # killed between the two renames of `publish`
        _remove(scratch, aside)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            _remove(scratch, aside)


def publish(scratch: Path, output: Path) -> None:
    """Sync `scratch` to disk, then replace `output` by it."""
    for folder, _, files in os.walk(scratch):
        for path in (*(Path(folder, name) for name in files), Path(folder)):
            _sync(path)
    aside = _beside(output, "replaced")
    if output.exists():
        output.rename(aside)
    scratch.rename(output)
    _sync(output.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically; OSError on failure. The last of several writers wins."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _beside(output: Path, what: str) -> Path:
    return output.with_name(f".{output.name}.dflash-trt-{what}")


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    path = _beside(output, "lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                break  # otherwise the last holder unlinked it after we opened it
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            raise BuildError(
                f"another build of {output} is running",
                "Wait for it, or give this one another --output",
            ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _remove(*directories: Path) -> None:
    for directory in directories:
        if directory.exists():
            shutil.rmtree(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
