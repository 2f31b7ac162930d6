"""What `serve` watches and does meanwhile, over stand-ins that note what they are told."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dflash_trt.errors import ServerError
from dflash_trt.serving.channel import HandlerStatus
from dflash_trt.serving.http import Phase, codec
from dflash_trt.serving.log import Log
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.supervisor import process, supervisor
from dflash_trt.serving.supervisor.application import Application
from dflash_trt.serving.supervisor.children import Child, Children
from dflash_trt.serving.supervisor.process import Server
from dflash_trt.serving.supervisor.supervisor import Supervised, supervise
from dflash_trt.serving.supervisor.upkeep import KeyFile, Upkeep
from tests.support.request_tools import wait_until

WAIT = 60.0
OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"


@dataclass
class StandIn:
    """Server, application and its client of a `serve` in one."""

    told: list[Phase] = field(default_factory=list)
    looks: int = 0
    launches: int = 0
    problem: str | None = None
    status: int | None = 200  # of a probe
    runs: bool = True  # the application
    starts: bool = True  # the application, again
    log: Any = None
    restarted: bool = False
    loads_drafter: bool = False

    def ended(self) -> str | None:
        self.looks += 1
        return self.problem

    def send_command(self, _: str) -> HandlerStatus:
        return HandlerStatus(0, 7)

    def is_alive(self, _: float) -> bool:
        return self.runs

    def probe(self, _: float) -> int | None:
        return self.status

    def tell(self, phase: Phase) -> None:
        self.told.append(phase)

    def poll(self) -> int | None:
        return None if self.runs else 1

    def has_started(self) -> bool:
        return True

    def launch(self, _: object) -> None:
        self.launches += 1
        if not self.starts:
            raise ServerError("the application did not start", "Read its log")
        self.runs = True

    def kill(self) -> None:
        self.restarted = True

    def start(self) -> None:
        self.problem = None

    def wait_ready(
        self, _stop: object, _say: object, _probe: object, look: Callable[[], None]
    ) -> bool:
        look()
        return True

    def count_own_restart(self) -> None: ...

    def count_server_restart(self) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Supervise a stand-in during the test."""
    monkeypatch.setattr(supervisor, "POLL", 0.01)
    monkeypatch.setattr(supervisor, "PROBE_INTERVAL", 0.01)
    stand_in: Any = StandIn()
    care = Upkeep(stand_in, KeyFile(None, (), print), Mock(lost=0), print)
    watched = Supervised(stand_in, stand_in, stand_in, care, print)
    stop = threading.Event()
    thread = threading.Thread(target=supervise, args=(watched, stop))
    thread.start()
    yield stand_in
    stop.set()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_server_that_answers_no_round_is_unready(stand_in: StandIn) -> None:
    stand_in.status = 503
    wait_until(lambda: stand_in.told == ["unready"])
    stand_in.status = 200
    wait_until(lambda: stand_in.told == ["unready", "ready"])


def test_triton_is_watched_while_an_application_cannot_start(stand_in: StandIn) -> None:
    stand_in.starts = stand_in.runs = False
    wait_until(lambda: stand_in.launches)
    before = stand_in.looks
    wait_until(lambda: stand_in.looks > before + 10)
    stand_in.problem = "tritonserver ended"
    wait_until(lambda: stand_in.restarted and stand_in.problem is None)
    assert stand_in.launches == 1  # it waits before it is tried again


def test_an_application_that_ends_while_triton_starts_is_started(stand_in: StandIn) -> None:
    launches_meanwhile = list[int]()

    def wait_ready(_stop: object, _say: object, _probe: object, look: Callable[[], None]) -> bool:
        stand_in.runs = False
        for _ in range(10):
            look()
        launches_meanwhile.append(stand_in.launches)
        return True

    stand_in.wait_ready = wait_ready  # type: ignore[method-assign]
    stand_in.problem = "tritonserver ended"
    wait_until(lambda: launches_meanwhile)
    assert launches_meanwhile[0] > 0


def test_a_child_is_not_taken_away_while_somebody_looks_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart closes its descriptor, whose number may then be another file's."""
    children, taken = Children(), threading.Event()
    process = subprocess.Popen(["sleep", "1000"])

    def forget() -> None:
        children.forget()
        taken.set()

    def look(_: Child) -> bool:
        thread = threading.Thread(target=forget)
        thread.start()
        thread.join(0.2)
        return taken.is_set()

    try:
        children.hold({process.pid: "draft"}, os.getpid())
        assert children.models == {"draft"}
        assert children.ended() is None
        with monkeypatch.context() as patch:
            patch.setattr(Child, "has_ended", property(look))
            assert children.ended() is None
        wait_until(taken.is_set)
        assert children.models == set()
    finally:
        process.kill()
        process.wait()


def test_a_server_that_loads_a_drafter_is_not_taken_for_hung(stand_in: StandIn) -> None:
    stand_in.loads_drafter = True
    stand_in.status = 503
    before = stand_in.looks
    wait_until(lambda: stand_in.looks > before + 20)
    assert not stand_in.told
    stand_in.loads_drafter = False
    wait_until(lambda: stand_in.told == ["unready"])


def test_a_drafter_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = ["it is broken", TimeoutError(), ValueError(), ""]
    monkeypatch.setattr(process, "load_drafter", Mock(side_effect=answers))
    server: Any = Mock()
    for reason in ("it is broken", "does not answer", "does not answer"):
        with pytest.raises(ServerError, match=f"the drafter did not load: .*{reason}"):
            Server.load_drafter(server, Path("build"))
        assert not server.loads_drafter
    Server.load_drafter(server, Path("build"))


# --- the key file -------------------------------------------------------------------------------


def keys_of(path: Path, said: list[str]) -> KeyFile:
    file = KeyFile(path, (OLD,), said.append)
    assert file.changed_keys() is None
    return file


def test_a_key_of_the_same_length_written_in_place_is_seen(tmp_path: Path) -> None:
    path, said = tmp_path / "keys", list[str]()
    path.write_text(OLD + "\n")
    os.utime(path, ns=(1, 1))
    file = keys_of(path, said)
    path.write_text(NEW + "\n")
    assert file.changed_keys() == (NEW,)
    assert file.changed_keys() is None
    assert len(said) == 1


def test_a_program_that_sets_the_time_back_hides_no_key(tmp_path: Path) -> None:
    """As `cp --preserve` and `rsync --times` do."""
    path = tmp_path / "keys"
    path.write_text(OLD + "\n")
    file = keys_of(path, [])
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text(NEW + "\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.changed_keys() == (NEW,)


def test_keys_that_changed_while_the_server_started_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(NEW + "\n")
    assert KeyFile(path, (OLD,), print).changed_keys() == (NEW,)


def test_a_file_without_keys_leaves_the_old_ones(tmp_path: Path) -> None:
    path, said = tmp_path / "keys", list[str]()
    path.write_text(OLD + "\n")
    file = keys_of(path, said)
    path.write_text("short")
    assert file.changed_keys() is None
    path.unlink()
    assert file.changed_keys() is None
    assert len(said) == 2


# --- the application's process ------------------------------------------------------------------

APPLICATION = """#!/bin/sh
# stands in for the application: says that it listens and keeps what it is told
echo listening
exec cat > "$TOLD"
"""


def test_its_settings_come_before_any_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, told = tmp_path / "python", tmp_path / "told"
    program.write_text(APPLICATION)
    program.chmod(0o755)
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setattr(sys, "executable", str(program))
    log = Log(tmp_path / "log")
    running = Application(Mock(directory=tmp_path), free_ports().http, Ports(1, 2, 3), Security())
    teller = threading.Thread(target=running.change_keys, args=((NEW,),))

    def write_while_told(settings: Any) -> bytes:
        teller.start()
        teller.join(0.2)  # unless it waits
        return codec.dump_json(settings)

    place = "dflash_trt.serving.supervisor.application.codec"
    monkeypatch.setattr(place, Mock(dump_json=write_while_told))
    running.start(log)
    teller.join(WAIT)
    wait_until(lambda: told.read_bytes().count(b"\n") == 3)
    running.stop()
    lines = told.read_text().splitlines()
    assert lines[0].startswith('{"listener":')
    assert all(line.startswith('{"phase":') for line in lines[1:])
    log.close()


def test_one_that_reads_nothing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs; many keys are more than its pipe holds."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho listening\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("dflash_trt.serving.supervisor.application.WRITE_TIMEOUT", 0.1)
    log = Log(tmp_path / "log")
    running = Application(Mock(directory=tmp_path), free_ports().http, Ports(1, 2, 3), Security())
    running.start(log)
    running.change_keys(tuple(f"{NEW}-{number}" for number in range(10_000)))
    wait_until(lambda: running.poll() is not None)
    running.stop()
    log.close()
