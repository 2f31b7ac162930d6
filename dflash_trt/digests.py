"""Digests of files: SHA-256, or BLAKE3 from `LARGE` bytes on (as `b3sum` prints it).

Without SHA instructions SHA-256 takes several times as long as writing the file.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from dflash_trt.files import open_regular

LARGE = 1 << 28

Entry = dict[str, str | int]  # a file in a manifest: digest by kind, and size


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def begin(size: int) -> tuple[str, Hash]:
    """Return the kind of digest for a file of `size` bytes, and an empty hash."""
    if size < LARGE:
        return "sha256", hashlib.sha256()
    return "blake3", blake3()


def entry(file: Path) -> Entry:
    """Return a file's digest and its size in bytes."""
    size = file.stat().st_size
    kind, digest = begin(size)
    with open_regular(file) as stream:
        # not blake3's memory map: its pages would count as memory of the build
        hashlib.file_digest(stream, lambda: digest)  # type: ignore[arg-type,return-value]
    return {kind: digest.hexdigest(), "size": size}


def sha256(files: Iterable[Path]) -> str:
    """Return the digest of several concatenated files."""
    digest = hashlib.sha256()
    for file in files:
        with open_regular(file) as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
