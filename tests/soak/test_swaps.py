"""Swap after swap under load, with kill -9: each request answered once, memory as it was.

What a killed server had not begun to answer is repeated by our client over gRPC; over HTTP, and
where a stream had begun, the clients here ask again, as any client has to.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from dflash_trt.serving.server.reaper import SHARED_MEMORY, processes_naming
from live import serving
from processes import family, parent_of, prefixes_of, private
from swaps import WAIT, Clients, asking, build_changed, servers_of

from dflash_trt.errors import ServerError
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.server import call

pytestmark = pytest.mark.soak

SWAPS = int(os.environ.get("DFLASH_TRT_SWAPS", "20"))  # of build, and as many of drafter
CLIENTS = 32
KILL_EACH = 5
GROWTH = 1.2  # of all processes' memory, from after the first two swaps to after the last


def _children(pid: int, model: str) -> list[int]:
    """The model's processes; model: empty: the servers."""
    servers = servers_of(pid)
    if not model:
        return servers
    found = processes_naming(f"/{model}/1/model.py")
    return [each for each in found if parent_of(each) in servers]


def _kill_one(pid: int, model: str, newest: bool, killed: list[float]) -> None:
    """Kills the next server, or `draft`, a moment after it is there; or the old one."""
    old, deadline = _children(pid, model), time.monotonic() + WAIT
    while not (new := [each for each in _children(pid, model) if each not in old]):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1.0 if not model else 0.3))
    killed.append(time.monotonic())
    os.kill((new if newest else old)[0], signal.SIGKILL)


def _memory(pid: int) -> int:
    """Bytes of `serve` and all of its processes that no other has."""
    return sum(map(private, family(pid)))


def _swap(
    pid: int, ports: Ports, build: Path, model: str, victim: str
) -> tuple[bool, float | None]:
    """Whether it was done, and when one was killed."""
    killed, done = list[float](), True
    arguments = (pid, model, victim == "new", killed)
    killer = threading.Thread(target=_kill_one, args=arguments)
    if victim:
        killer.start()
    try:
        list(call(ports.http, {"build": str(build), "least": 0.0, "drain": WAIT}))
    except ServerError:
        if not victim:
            raise
        done = False
    if victim:
        killer.join(2 * WAIT)
    return done, next(iter(killed), None)


def _more(clients: Clients, count: int) -> None:
    count, deadline = len(clients.answers) + count, time.monotonic() + WAIT
    while len(clients.answers) < count:
        assert time.monotonic() < deadline, clients.errors[-3:]
        time.sleep(0.05)


def test_swaps_with_kills_lose_no_request(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builds = {
        "": [build_changed(tmp_path / "target", "target", 0.1), built],
        "draft": [build_changed(tmp_path / "drafter", "drafter", 0.05), built],
    }
    ports, outages, undone, kills = free_ports(), list[tuple[float, float]](), 0, 0
    prefixes = set[str]()  # of shared memory
    with serving(built, ports) as (process, _):
        memory = 0
        with asking(ports, CLIENTS, retries=50) as clients:
            _more(clients, CLIENTS)
            for model, pair in builds.items():
                at = 1  # the build that is served, of the two
                for number in range(SWAPS):
                    kill = number % KILL_EACH == KILL_EACH - 1
                    victim = random.choice(("new", "old")) if kill else ""
                    done, killed = _swap(process.pid, ports, pair[1 - at], model, victim)
                    at = 1 - at if done else at
                    undone, kills = undone + (not done), kills + kill
                    prefixes |= prefixes_of(family(process.pid))
                    _more(clients, CLIENTS)
                    if victim == "old" and killed is not None:
                        outages.append((killed, time.monotonic()))
                    if number == 1 and not memory:
                        memory = _memory(process.pid)
                if at == 0:  # both begin with the same
                    list(call(ports.http, {"build": str(built), "least": 0.0, "drain": WAIT}))
            after = _memory(process.pid)
        with Client(f"127.0.0.1:{ports.grpc}") as client:
            assert client.generate("a", max_tokens=4).choices[0].text
        with capsys.disabled():
            print(
                f"\n{len(clients.answers)} answers, {len(clients.errors)} asked again, "
                f"{kills} killed, {undone} swaps undone, "
                f"{memory / 1e6:.0f} MB, then {after / 1e6:.0f} MB"
            )
        assert len(clients.texts()) == 2
        lost = [
            error
            for error in clients.errors
            if not any(error[0] < end and error[1] > start for start, end in outages)
        ]
        assert lost == []
        assert after < GROWTH * memory
        process.terminate()
        process.wait(WAIT)
    for prefix in prefixes:
        assert not processes_naming(prefix)
        assert not list(SHARED_MEMORY.glob(f"{prefix}*"))
