"""Digests of files: SHA-256, and for files from `LARGE` bytes on BLAKE3 (as `b3sum` prints it).

On a CPU without SHA instructions SHA-256 would take several times as long as writing the file.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from dflash_trt.files import open_regular

LARGE = 1 << 28
CHUNK = 1 << 20  # bytes read at a time: what stays in a core's cache

Entry = dict[str, str | int]  # a file in a manifest: its digest by the name of its kind, and size


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def begin(size: int) -> tuple[str, Hash]:
    """The kind of digest for a file of `size` bytes, and an empty one."""
    if size < LARGE:
        return "sha256", hashlib.sha256()
    return "blake3", blake3()


def entry(file: Path) -> Entry:
    """A file's digest and its size in bytes."""
    size = file.stat().st_size
    kind, digest = begin(size)
    _read(file, digest)
    return {kind: digest.hexdigest(), "size": size}


def sha256(files: Iterable[Path]) -> str:
    """Of several files, one behind the other."""
    digest = hashlib.sha256()
    for file in files:
        _read(file, digest)
    return digest.hexdigest()


def _read(file: Path, digest: Hash) -> None:
    with open_regular(file) as stream:
        # not a memory map, as blake3 has: its pages would count as memory of the build
        chunk = memoryview(bytearray(min(CHUNK, file.stat().st_size + 1)))
        while size := stream.readinto(chunk):
            digest.update(chunk[:size])
