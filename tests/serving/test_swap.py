"""`dflash-trt swap` on the real server: another build, another drafter, and no request lost."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from builds import quiet
from commands import run
from live import metrics, serve_ports, serving
from pycode import CONFIG
from swaps import WAIT, Clients, asking, build_changed, servers_of

from dflash_trt.build.run import build
from dflash_trt.config import load_config
from dflash_trt.engines import CORES
from dflash_trt.errors import ServerError
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.server import call, proof, swap
from dflash_trt.serving.server.process import DRAFTER, Server
from dflash_trt.serving.server.run import prepare


@dataclass
class Served:
    process: subprocess.Popen[str]
    ports: Ports
    openai: int
    builds: dict[str, Path]  # a: that it began with; target, drafter: other ones; bad: a drafter

    def swap(self, build: str | None, least: float = 0.2) -> list[str]:
        """What it says; build: None goes back."""
        path = None if build is None else str(self.builds[build])
        return list(call(self.ports.http, {"build": path, "least": least, "drain": WAIT}))

    def drafter(self) -> Path:
        """The build whose drafter is loaded, as Triton has it."""
        config = httpx.get(f"http://127.0.0.1:{self.ports.http}/v2/models/draft/config").json()
        return Path(config["parameters"]["engine"]["string_value"]).parents[1]

    def servers(self) -> list[int]:
        """Its tritonserver processes."""
        return servers_of(self.process.pid)


@pytest.fixture(scope="module")
def served(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("swaps")
    builds = {
        "a": built,
        "target": build_changed(directory / "target", "target", 0.1),
        "drafter": build_changed(directory / "drafter", "drafter", 0.05),
        "bad": build_changed(directory / "bad", "drafter", 3.0),
    }
    ports = serve_ports()
    openai = ports.http
    with serving(built, ports) as (process, _):
        yield Served(process, ports, openai, builds)
        process.terminate()
        process.wait(WAIT)


@pytest.fixture
def clients(served: Served) -> Iterator[Clients]:
    """In flight from the beginning to the end of a test, which loses none of them."""
    with asking(served.ports, 8) as clients:
        _wait_for(lambda: len(clients.answers) >= 8)
        yield clients
        count = len(clients.answers)
        _wait_for(lambda: len(clients.answers) >= count + 8)
    assert clients.errors == []


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_another_build_takes_over_and_goes_back(served: Served, clients: Clients) -> None:
    (old,), (first,) = served.servers(), clients.texts()
    said = served.swap("target")
    assert [re.sub(r"[\d.]+ tokens.*|/\S+", "*", line) for line in said if line[:5] == "swap:"] == [
        "swap: from * to *",
        "swap: it commits *",
        "swap: * serves; * drains",
        "swap: * has ended",
    ]
    (new,) = served.servers()
    assert new != old
    count = len(clients.answers)
    _wait_for(lambda: len(clients.answers) >= count + 16)
    assert {text for _, text in clients.answers[count + 8 :]} == clients.texts() - {first}
    assert len(clients.texts()) == 2
    assert httpx.get(f"http://127.0.0.1:{served.openai}/health").status_code == 200
    assert "dflash_acceptance_length" in metrics(served.ports)

    served.swap(None)
    assert served.servers() not in ([old], [new])
    count = len(clients.answers)
    _wait_for(lambda: len(clients.answers) >= count + 16)
    assert {text for _, text in clients.answers[count + 8 :]} == {first}
    assert len(clients.texts()) == 2  # whole ones of either build


def test_another_drafter_is_loaded_alone(served: Served, clients: Clients) -> None:
    servers = served.servers()
    said = served.swap("drafter")
    assert "its drafter was loaded, and nothing else" in said[-1]
    served.swap(None)
    assert served.servers() == servers
    assert len(clients.texts()) == 1


def test_a_worse_drafter_does_not_stay(served: Served, clients: Clients) -> None:
    """With other clients, for whom a policy decides how much is drafted: a proof always drafts."""
    with pytest.raises(ServerError, match="tokens a round") as failed:
        served.swap("bad", least=0.8)
    found, last = map(float, re.findall(r"[0-9]\.[0-9]+", str(failed.value))[:2])
    assert found < 1.3 < 2 < last
    assert served.drafter() == served.builds["a"]
    assert len(clients.texts()) == 1
    served.swap("drafter")
    assert served.drafter() == served.builds["drafter"]
    served.swap("a", least=0.0)


def test_what_cannot_be_swapped_is_said(served: Served, tmp_path: Path) -> None:
    served.builds["none"] = tmp_path
    with pytest.raises(ServerError, match="not a directory that `dflash-trt build` made"):
        served.swap("none")
    drafter = {"build": str(served.builds["drafter"]), "least": 0.0, "drain": WAIT}
    said = call(served.ports.http, drafter)
    next(said)
    with pytest.raises(ServerError, match="a swap is under way"):
        served.swap("none")
    assert "loaded" in list(said)[-1]
    served.swap(None)
    with pytest.raises(ServerError, match=r"no `dflash-trt serve` of yours has HTTP port 1\."):
        list(call(1, {}))


def test_the_same_build_takes_other_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is lost, and the texts stay what they were."""
    long_wrong, over = threading.Event(), threading.Event()
    said = list[str]()

    def watch(ours: Any, taken: Any, change: Any, wait: Any) -> None:
        long_wrong.wait(WAIT)
        assert taken() == 2
        change(1)
        over.set()

    monkeypatch.setattr(swap, "watch_cores", watch)
    built = tmp_path / "built"
    build(load_config(CONFIG), built, quiet)
    ports = serve_ports()
    with ExitStack() as stack:
        server, gateway = prepare(stack, built, ports, Security(), cores=2)
        swaps = stack.enter_context(swap.Swaps(server, gateway, said.append, "none", None))
        stack.callback(gateway.stop)
        gateway.start(server.log)
        assert server.wait_ready()
        gateway.tell("ready")
        swaps.start(ports.http)
        assert _cores_of(server) == {"2"}
        with asking(ports, 4) as clients:
            _wait_for(lambda: len(clients.answers) >= 4)
            long_wrong.set()
            assert over.wait(WAIT), said
            count = len(clients.answers)
            _wait_for(lambda: len(clients.answers) >= count + 8)
        assert clients.errors == []
        assert len(clients.texts()) == 1
        assert _cores_of(swaps.server) == {"1"}
        swaps.stop.set()
        swaps.wait()
        assert "cores: others leave 1, and engines take 2; a swap follows" in said


def _cores_of(server: Server) -> set[str]:
    variables = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in server.stubs()]
    return {each.split("=")[1] for of in variables for each in of if each.startswith(f"{CORES}=")}


@pytest.mark.parametrize("whole", [True, False])
def test_memory_for_two_is_looked_at_before_anything_is_loaded(
    built: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    proof.check_memory([os.getpid()], built, built)
    never = Mock(side_effect=AssertionError)
    monkeypatch.setattr(proof, "free_memory", lambda: 1000)
    monkeypatch.setattr(swap, "Server", never)
    server: Any = Mock(repository=built / "model_repository", load_drafter=never)
    server.process.pid = os.getpid()
    server.stubs.return_value = {os.getpid(): DRAFTER}
    swaps = swap.Swaps(server, Mock(), lambda line: None, "none", None)
    if whole:
        swaps._manifest |= {"target": {}}
    with pytest.raises(ServerError, match="GB of memory beside the running one"):
        swaps._do({"build": str(built), "least": 0.0, "drain": WAIT}, lambda line: None)
    assert not server.health.method_calls


def test_the_command_says_what_it_lacks() -> None:
    assert run("swap") == (
        1,
        "",
        "error: one build is to be served next. Give either BUILD or --back.\n",
    )
    code, out, err = run("swap", "--back", "--http-port=1")
    assert (code, out) == (1, "")
    assert "no `dflash-trt serve` of yours has HTTP port 1." in err
