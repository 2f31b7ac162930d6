"""What a running server keeps from other users of its machine and from its own clients."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.serving.internal import SOCKET
from dflash_trt.serving.process import Server
from dflash_trt.serving.reaper import SHARED_MEMORY
from dflash_trt.serving.server import free_ports

OTHERS = stat.S_IRWXG | stat.S_IRWXO


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Server]:
    with Server(built, free_ports()) as server:
        server.wait_ready()
        yield server


def test_no_other_user_may_read_anything_of_it(server: Server) -> None:
    runtime = server.log.parent
    regions = list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))
    assert len(regions) >= 4
    assert (runtime / SOCKET).is_socket()
    mine = [runtime, server.log, runtime / SOCKET, *regions]
    assert [path for path in mine if path.stat().st_mode & OTHERS] == []
