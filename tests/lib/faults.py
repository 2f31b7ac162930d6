"""The plan of faults, and what a fault does to a process while it lasts."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from load import HOST

HOLD = 3.0  # seconds that a fault lasts
ENDING = 8.0  # seconds that a process may take to end; Triton's models do not when they are told
SIGNALS = {
    "killed": signal.SIGKILL,
    "ended": signal.SIGTERM,
    "stopped": signal.SIGSTOP,
}
LIMITS = {
    "memory": resource.RLIMIT_AS,
    "files": resource.RLIMIT_NOFILE,
    "disk": resource.RLIMIT_FSIZE,
}
BURNERS = 3  # beside a process of the least priority, on its one core
DAY = 86400
MODELS = ("verify", "draft", "dflash", "dflash_infer")
SERVERS = ("serve", "gateway", "tritonserver", "dflash", "verify")
SENT, STARVED = ("killed", "ended", "stopped"), ("cpu", "memory", "files")


class Cell(NamedTuple):
    phase: str
    process: str
    fault: str

    def __str__(self) -> str:
        return "-".join(self)


# in which phases which processes get which faults
PLAN: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    (("build", "sign"), ("command",), (*SENT, *STARVED, "disk", "clock")),
    (("start",), (*SERVERS, "draft", "dflash_infer", "reaper"), ("killed",)),
    (("start",), SERVERS, ("ended", "stopped")),
    (("start", "measuring"), ("tritonserver", "verify"), STARVED),
    (("measuring",), ("tritonserver", "dflash", "verify"), SENT),
    (("prefill",), SERVERS[1:], SENT),
    (("decode",), SERVERS, (*SENT, *STARVED)),
    (("swap",), (*SERVERS[:-1], "old tritonserver"), SENT),
    (("drain",), SERVERS, SENT),
    (("start", "decode"), ("machine",), ("shm", "disk", "clock")),
    (("decode", "drain"), ("client",), ("slow", "gone", "silent")),
]
CELLS = [
    Cell(*each)
    for phases, processes, faults in PLAN
    for each in ((x, y, z) for x in phases for y in processes for z in faults)
]


@contextmanager
def spoilt(pid: int, fault: str) -> Iterator[None]:
    """Within the block a process has a fault, or has had a signal."""
    if fault in SIGNALS:
        os.kill(pid, SIGNALS[fault])
        deadline = time.monotonic() + ENDING
        while fault != "stopped" and alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    elif fault == "cpu":
        with _starved(pid):
            yield
    else:
        before = resource.prlimit(pid, LIMITS[fault])
        resource.prlimit(pid, LIMITS[fault], (_taken(pid, fault), before[1]))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, LIMITS[fault], before)


def alive(pid: int) -> bool:
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def _taken(pid: int, fault: str) -> int:
    """What it has already, of what it is to get no more."""
    if fault == "memory":
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096
    if fault == "files":
        used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
        return next(number for number in range(len(used) + 1) if number not in used)
    return 4096  # bytes of a file


@contextmanager
def _starved(pid: int) -> Iterator[None]:
    core = min(os.sched_getaffinity(0))
    burn = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(BURNERS)]
    cores = os.sched_getaffinity(pid)
    try:
        _move(pid, {core}, 19)
        yield
    finally:
        for each in burners:
            each.kill()
            each.wait()
        _move(pid, cores, 0)


def _move(pid: int, cores: set[int], nice: int) -> None:
    """All of its threads."""
    with suppress(OSError):  # it has ended
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):
                os.sched_setaffinity(thread, cores)
                os.setpriority(os.PRIO_PROCESS, thread, nice)


def make_clock(directory: Path) -> dict[str, str]:
    """The environment of processes whose wall clock `set_clock` sets; it needs a C compiler."""
    library, source = directory / "clock.so", Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    (directory / "clock").write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "CLOCK": str(directory / "clock")}


def set_clock(directory: Path, days: int) -> None:
    """Forth, or back."""
    with (directory / "clock").open("r+b") as stream:
        stream.write(struct.pack("q", days * DAY))


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """A file system without room."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 12))
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextmanager
def bad_clients(port: int, fault: str, count: int = 8) -> Iterator[None]:
    """slow: they read a byte a second; gone: they reset; silent: they send half a request."""
    body = b'{"text_input": "a", "max_tokens": 150, "n": 4, "stream": true}'
    head = (
        b"POST /v2/models/dflash/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    )
    request = head % len(body) + body
    sockets = []
    for _ in range(count):
        each = socket.socket()
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        each.connect((HOST, port))
        each.sendall(request[: -len(body) // 2] if fault == "silent" else request)
        sockets.append(each)
    if fault == "gone":
        time.sleep(0.2)
        for each in sockets:  # closing resets the connection
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            each.close()
        sockets = []
    try:
        if fault == "slow":
            for each in sockets:
                each.recv(1)
            time.sleep(1)
        yield
    finally:
        for each in sockets:
            with suppress(OSError):
                each.recv(1)
            each.close()
