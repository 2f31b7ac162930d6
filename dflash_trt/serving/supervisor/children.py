"""Processes of Triton's models, children of one tritonserver, and of its MPI job, a session.

A child is held by a descriptor, so that another user's process, or a later one with the same
number, is never taken for it.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STUB = "triton_python_backend_stub"  # the program that runs a Python model
ENDED = "ZX"  # states of a process that nobody has waited for


@dataclass(frozen=True)
class Child:
    pid: int
    model: str
    handle: int  # descriptor of the process

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.handle)


class Children:
    """The processes of models that have been seen, which several threads look at and change."""

    def __init__(self) -> None:
        self._held: dict[int, Child] = {}  # by pid
        self._lock = threading.Lock()  # a descriptor is closed when nobody looks at it any more

    def hold(self, models: Mapping[int, str], server: int) -> None:
        """Add the server's processes that are not held yet. OSError without a free descriptor."""
        with self._lock:
            for pid in models.keys() - self._held.keys():
                child = hold(pid, models[pid], server)
                if child is not None:
                    self._held[pid] = child

    @property
    def models(self) -> set[str]:
        with self._lock:
            return {child.model for child in self._held.values()}

    def ended(self) -> Child | None:
        """Return a child that has ended, if there is one."""
        with self._lock:
            return next((child for child in self._held.values() if child.has_ended), None)

    def kill(self, seconds: float) -> None:
        """End all of them, wait for that at most `seconds`, and forget them."""
        with self._lock:
            kill_all(self._held.values(), seconds)
        self.forget()

    def forget(self) -> None:
        with self._lock:
            for child in self._held.values():
                child.close()
            self._held = {}


def models_of(server: int) -> dict[int, str]:
    """Return the model of each process that runs one for this tritonserver."""
    models = {}
    for pid in _children_of(server):
        words = command_line(pid)
        if words and words[0].endswith(STUB):
            models[pid] = Path(words[1]).parent.parent.name  # MODEL/1/model.py
    return models


def hold(pid: int, model: str, server: int) -> Child | None:
    """Return a child of the server; None if it has ended. OSError without a free descriptor."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if parent_of(pid) != server:  # the number has a new owner
        os.close(handle)
        return None
    return Child(pid, model, handle)


def kill_all(children: Iterable[Child], seconds: float) -> None:
    """End the processes and wait for that, at most `seconds`."""
    left = list(children)
    for child in left:
        child.kill()
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left = [child for child in left if not child.has_ended]
        time.sleep(0.01)


def kill_session(leader: int, seconds: float) -> None:
    """End all processes of a session and wait for that, at most `seconds`.

    Not for a leader that was waited for already: its number may have a new owner.
    """
    deadline = time.monotonic() + seconds
    while (pids := _members_of(leader)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def command_line(pid: int) -> list[str]:
    """Return a process's words; none if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def parent_of(pid: int) -> int | None:
    status = _status_of(pid)
    return int(status[1]) if status else None


def _children_of(parent: int) -> list[int]:
    return [pid for pid in all_pids() if parent_of(pid) == parent]


def _members_of(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    members = []
    for pid in all_pids():
        status = _status_of(pid)
        if status and int(status[3]) == session and status[0] not in ENDED:
            members.append(pid)
    return members


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _status_of(pid: int) -> list[str]:
    """Return state, parent, process group, session and more; nothing if it has ended."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text()
        _, _, after_name = status.rpartition(")")  # the name may hold anything
        return after_name.split()
    return []
