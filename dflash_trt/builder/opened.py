"""A build that is served: what is started again is what was checked."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.builder.manifest import (
    MANIFEST,
    Depth,
    build_digest,
    differences,
    file_name,
    files_of,
    read_manifest,
)
from dflash_trt.builder.signing import check_signed
from dflash_trt.errors import BuildError

# the file system has none; NFS has no exclusive ones on a file that is open for reading
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)


@dataclass(frozen=True)
class _Stamp:
    """What changes when a file's content does, or when another file takes its place."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds
    changed: int


class OpenedBuild:
    """A checked build, locked against `build` until it is closed.

    depth, signer: see `check_signed`. Raises BuildError for a directory that is no build, or not as
    it was built.
    """

    def __init__(
        self, directory: Path, depth: Depth | None = None, signer: Path | None = None
    ) -> None:
        self.directory = directory.resolve()
        self.manifest = read_manifest(self.directory)
        self._lock = _lock_shared(self.directory)
        try:
            self._stamps = _stamps(self.directory)
            self.digest = build_digest(self.directory)
            check_signed(self.directory, depth, signer)
            self.check_unchanged()
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        """Raise BuildError if the files are no longer those that were checked.

        Files that others have written again are read again, and may hold only what they held.
        """
        stamps = _stamps(self.directory)
        if stamps == self._stamps:
            return
        changes = self._changes(stamps)
        if changes:
            raise BuildError(
                f"{self.directory} changed after it was opened: {changes}",
                "Put it back, or stop this server and serve the new one",
            )
        self._stamps = stamps

    def close(self) -> None:
        os.close(self._lock)

    def _changes(self, stamps: dict[str, _Stamp]) -> str:
        if build_digest(self.directory) != self.digest:
            return "it is another build"
        names = stamps.keys() | self._stamps.keys()
        touched = {name for name in names if stamps.get(name) != self._stamps.get(name)}
        different = differences(self.directory, self.manifest, "full", digested=names - touched)
        return str(different.among(touched))


def refuse_if_served(directory: Path) -> None:
    with unserved(directory):
        pass


@contextmanager
def unserved(directory: Path) -> Iterator[None]:
    """Keep `serve` from opening a build within the block; BuildError if one has it open."""
    try:
        handle = os.open(directory / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        with _locks_may_be_missing():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BuildError(
            f"a server runs from {directory}",
            "Give another --output, and serve that one; or stop the server first",
        ) from None
    finally:
        os.close(handle)


def _lock_shared(directory: Path) -> int:
    """Return a descriptor with a lock, which ends with it or with the process."""
    handle = os.open(directory / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _locks_may_be_missing():
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        replaced = not os.path.samestat(os.fstat(handle), os.stat(directory / MANIFEST))
    except (BlockingIOError, FileNotFoundError):
        replaced = True
    if replaced:
        os.close(handle)
        raise BuildError(f"{directory} is being replaced", "Serve it when that has ended")
    return handle


@contextmanager
def _locks_may_be_missing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _stamps(directory: Path) -> dict[str, _Stamp]:
    stamps = {}
    for file in files_of(directory):
        with suppress(FileNotFoundError):
            status = file.lstat()
            stamps[file_name(directory, file)] = _Stamp(
                status.st_dev,
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
    return stamps
