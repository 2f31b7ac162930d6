"""The cores that a server's engines may take: those that nobody else keeps busy.

A product waits for all of its threads. One that shares its core with another program makes it last
about twice as long: then a thread fewer is faster (`docs/benchmarks.md`, "Threads").
"""

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from dflash_trt.engines import read_infos, roles
from dflash_trt.machine import usable_cores

FIRST = 0.5  # seconds of the look before a server is started
WINDOW = 60.0  # seconds of each look while it serves
LOOKS = 5  # in a row, until a choice counts as wrong; twice as many after each change
GAIN = 1.25  # so many times the cores have to be free until more are taken


class Others:
    """What other programs compute on the cores of this process, from one look to the next.

    ours: ids of processes that do not count, nor what is in a session that they lead.
    root: where /proc and /sys are.
    """

    def __init__(self, ours: Callable[[], Collection[int]], root: Path = Path("/")) -> None:
        self._ours, self._root = ours, root
        self._last = self._look()

    def busy(self) -> float:
        """How many CPUs they kept busy since the last look."""
        (began, before), self._last = self._last, self._look()
        ended, after = self._last
        return max(0.0, after - before) / (ended - began)

    def free_cores(self) -> int:
        """Those that they left since the last look, at least 1."""
        return usable_cores(self._root, self.busy())

    def _look(self) -> tuple[float, float]:
        """The time, and how long others have computed; seconds of a common beginning."""
        busy = _busy(self._root, os.sched_getaffinity(0)) - _own(self._root, self._ours())
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK")


def free_cores() -> int:
    """As this process finds them while it only looks."""
    others = Others(lambda: [])
    time.sleep(FIRST)
    return others.free_cores()


def follows_cores(build: Path) -> bool:
    """Whether its engines take what cores there are: on a CPU, by no set number of threads."""
    if not any(map(Path.is_dir, roles(build / "engines"))):  # TensorRT-LLM's
        return False
    target = read_infos(build / "engines")[0]
    return target.plan is None and target.device == "cpu" and target.threads is None


def watch_cores(
    ours: Callable[[], Collection[int]],
    taken: Callable[[], int],
    change: Callable[[int], None],
    wait: Callable[[float], bool],
) -> None:
    """Calls `change` with the cores to take, when those `taken` have long not been the right ones.

    wait: sleeps so many seconds; whether that is the end.
    """
    others, wrong, patience = Others(ours), 0, LOOKS
    while not wait(WINDOW):
        has = free = taken()
        with suppress(OSError):  # of a lack of files, which says nothing of cores
            free = others.free_cores()
        wrong = wrong + 1 if free < has or free >= GAIN * has else 0
        if wrong >= patience:
            change(free)
            others, wrong, patience = Others(ours), 0, 2 * patience


def _busy(root: Path, cpus: Collection[int]) -> int:
    """Ticks that these CPUs have computed, for other machines on the same host too (proc(5))."""
    ticks = 0
    with suppress(OSError):  # hidden here: then nobody else is to be seen
        for line in (root / "proc/stat").read_text().splitlines():
            name, *rest = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cpus:
                user, nice, system, _idle, _waits, irq, softirq, steal = map(int, rest[:8])
                ticks += user + nice + system + irq + softirq + steal
    return ticks


def _own(root: Path, ours: Collection[int]) -> int:
    """Ticks of these processes, of those in their sessions, and of children that ended."""
    ticks = 0
    for process in (root / "proc").glob("[0-9]*") if ours else ():
        with suppress(OSError):  # it has ended
            words = (process / "stat").read_text().rpartition(") ")[2].split()
            if int(process.name) in ours or int(words[3]) in ours:
                ticks += sum(map(int, words[11:15]))  # utime, stime, cutime, cstime
    return ticks
