"""What a killed `serve` leaves behind, removed by the next one: shared memory, files, processes.

A runtime directory is a living server's as long as its lock is held. The lock ends with the
process, whatever ended it, and holds across containers that share the directory.
"""

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_trt.serving.channel import RUNTIME, RUNTIME_PREFIX, TEMPORARY
from dflash_trt.serving.supervisor.children import STUB, Child, all_pids, command_line, kill_all

SHARED_MEMORY = Path("/dev/shm")
SHM_PREFIX = re.compile(r"dflash_trt_[0-9a-f]{12}_")
LOCK = "lock"  # in a runtime directory; holds the prefix of the server's shared memory
LOG = "server.log"  # in it, too; stays
ENVIRONMENTS = "environments"  # in it, too; lists folders that Triton made in `TEMPORARY`
ENVIRONMENT = "python_env_??????"  # Triton's name of them
TRITON = "tritonserver"
END_TIMEOUT = 5.0  # seconds


def claim(runtime: Path, shm_prefix: str) -> int:
    """Mark a runtime directory as a living server's; return the descriptor to close at its end."""
    new = runtime / f"{LOCK}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(lock, shm_prefix.encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(runtime / LOCK)  # there is no lock that is not held, but of a server that is gone
    return lock


def remove_leftovers() -> None:
    """Remove what servers of this user have left that are gone."""
    for runtime in TEMPORARY.glob(f"{RUNTIME_PREFIX}*"):
        with suppress(OSError), _of_gone_server(runtime) as shm_prefix:
            end_processes(runtime)
            remove_regions(shm_prefix)
            remove_environments(runtime)
            clear(runtime, keep=runtime / LOG)


@contextmanager
def _of_gone_server(runtime: Path) -> Iterator[str]:
    """Yield the prefix of its shared memory; OSError if it is not proved to be gone."""
    status = runtime.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{runtime} is another user's")
    lock = os.open(runtime / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.read(lock, 100).decode()
    finally:
        os.close(lock)


def end_processes(runtime: Path) -> None:
    """End what is left of a Triton that has ended or is to end: itself, and its models."""
    children: list[Child] = []
    for pid in all_pids():
        with suppress(ProcessLookupError):
            child = Child(pid, "", os.pidfd_open(pid))
            if _is_of_triton(pid, runtime):
                children.append(child)
            else:
                child.close()
    kill_all(children, END_TIMEOUT)
    for child in children:
        child.close()


def _is_of_triton(pid: int, runtime: Path) -> bool:
    program = Path(next(iter(command_line(pid)), "")).name
    if program not in (STUB, TRITON):
        return False
    with suppress(OSError):  # it has ended, or is another user's
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return os.fsencode(f"{RUNTIME}={runtime}") in variables
    return False


def remove_regions(shm_prefix: str) -> None:
    if SHM_PREFIX.fullmatch(shm_prefix):
        for region in SHARED_MEMORY.glob(f"{shm_prefix}*"):
            region.unlink(missing_ok=True)


def environments() -> set[str]:
    """Return the folders of this user that Tritons have made, whichever these are."""
    folders = set()
    for folder in TEMPORARY.glob(ENVIRONMENT):
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                folders.add(folder.name)
    return folders


def note_environments(runtime: Path, names: set[str]) -> None:
    """Note the folders that came while a server's Triton started: one is its own."""
    with suppress(OSError):  # worth less than the start
        (runtime / ENVIRONMENTS).write_text("\n".join(sorted(names)))


def remove_environments(runtime: Path) -> None:
    """Remove noted folders that are empty, but those that a living server has noted, too."""
    names = _noted_environments(runtime)
    for other in TEMPORARY.glob(f"{RUNTIME_PREFIX}*"):
        if other != runtime:
            names -= _noted_environments(other)
    for name in names & environments():
        with suppress(OSError):  # it is not empty
            (TEMPORARY / name).rmdir()


def _noted_environments(runtime: Path) -> set[str]:
    with suppress(OSError, UnicodeDecodeError):
        return set((runtime / ENVIRONMENTS).read_text().split())
    return set()


def clear(runtime: Path, keep: Path | None) -> None:
    """Remove a server's runtime directory, or all in it but one file; its lock goes last."""
    for path in runtime.glob("*"):  # nothing if somebody has removed it
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != keep and path.name != LOCK:
            path.unlink(missing_ok=True)
    (runtime / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # the file may be in there
        runtime.rmdir()
