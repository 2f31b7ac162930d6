"""Every cell of `faults.PLAN`: nothing half written, no answer lost or mixed, back within BACK.

`DFLASH_TRT_FAULTS=1` runs all of them, else a tenth. The table is written to `build/faults.md`.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import load
import prove
import pytest
import yaml
from builds import contents
from dflash_trt.serving.server.calls import call
from faults import CELLS, HOLD, MODELS, Cell, bad_clients, full, make_clock, set_clock, spoilt
from load import Client, Expected, Job, RefusedError, ask_all
from processes import family, name_of
from signing_keys import write_keys
from tiny import LONGEST_TEXT, alone, build_pair, make_prompts, write_pair
from watched import Served, goes_idle, watched

from dflash_trt.build import check_build
from dflash_trt.build.signing import verify_signature
from dflash_trt.engines import COSTS_FILE
from dflash_trt.errors import ServerError
from dflash_trt.machine import machine
from dflash_trt.serving.server.process import SHARED_MEMORY, processes_naming

pytestmark = pytest.mark.soak

SHARE = float(os.environ.get("DFLASH_TRT_FAULTS", "0.1"))
BACK = 180.0  # seconds in which it serves again; on a machine that does other things, too
CLIENTS, FIRST = 6, 12  # clients, and their right answers before the fault
RUN = "import sys; from dflash_trt.cli.main import main; sys.exit(main())"
MEASURES = "measuring what rounds cost"
GOES_ON = ("stopped", "cpu", "clock")  # after which all goes on as if nothing had been
ENDS = ("killed", "ended")
RESTARTED = re.compile("ready again|starting it again|starting another|started another")
OFFLINE = [cell for cell in CELLS if cell.process == "command"]
OF_SERVER = [cell for cell in CELLS if cell.process != "command"]


def share(cells: list[Cell]) -> list[Cell]:
    return cells if SHARE >= 1 else random.Random(0).sample(cells, round(SHARE * len(cells)))


@dataclass
class Site:
    """Two builds of one pair, a key, and what the commands make when nothing is in their way."""

    directory: Path
    builds: list[Path]
    prompts: list[str]
    expected: Expected

    def command(self, phase: str, output: Path) -> list[str]:
        words = {
            "build": ("build", self.directory / "pair.yaml", "--output", output),
            "sign": ("sign", output, "--key", self.directory / "key.pem"),
        }
        return [sys.executable, "-c", RUN, *map(str, words[phase])]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    directory, prompts = tmp_path_factory.mktemp("faults"), make_prompts(24)
    write_pair(directory)
    builds = [
        build_pair(directory, mode, slots=8, max_queue=64) for mode in ("ensemble", "in_process")
    ]
    pair = {role: {"path": str(directory / role)} for role in ("target", "drafter")}
    (directory / "pair.yaml").write_text(yaml.safe_dump({"name": "tiny", **pair}))
    write_keys(directory)
    return Site(directory, builds, prompts, alone(directory, builds[0], prompts))


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[Cell, str]]:
    """What came of each cell; the table is written when all have run."""
    rows, here = dict[Cell, str](), machine()
    yield rows
    text = [f"Commit {prove.commit()}, {here['cores']} cores {here['cpu']}", ""]
    text += ["| phase | process | fault: what came, and seconds until it served |", "|---|---|---|"]
    for phase, process in dict.fromkeys((cell.phase, cell.process) for cell in rows):
        came = [f"{x.fault}: {what}" for x, what in rows.items() if x[:2] == (phase, process)]
        text.append(f"| {phase} | {process} | {'; '.join(came)} |")
    prove.REPORT.parents[1].mkdir(exist_ok=True)
    (prove.REPORT.parents[1] / "faults.md").write_text("\n".join(text) + "\n")


# --- commands -------------------------------------------------------------------------------------


def whole(site: Site, phase: str, output: Path) -> bool:
    """Whether the output is there; it is whole then."""
    if phase == "sign":
        if not (output / "model.sig").exists():
            return False
        verify_signature(output, site.directory / "key.pub")
    elif not output.exists():
        return False
    else:
        check_build(output, "full")
    return True


@pytest.mark.parametrize("cell", share(OFFLINE), ids=str)
def test_a_command(cell: Cell, site: Site, rows: dict[Cell, str], tmp_path: Path) -> None:
    phase, _, fault = cell

    def fresh(name: str) -> Path:
        folder = tmp_path / name / "output"
        folder.parent.mkdir()
        if phase == "sign":
            subprocess.run(["cp", "-r", site.builds[0], folder], check=True)
        return folder

    good, spoilt_ = fresh("good"), fresh("spoilt")
    start = time.monotonic()
    subprocess.run(site.command(phase, good), check=True, capture_output=True)
    seconds = time.monotonic() - start
    command, environment = site.command(phase, spoilt_), dict[str, str]()
    if fault == "clock":
        environment = make_clock(tmp_path)
        set_clock(tmp_path, -400)
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if fault != "clock":
        # nearly at its end something is written
        time.sleep(random.Random(str(cell)).uniform(0.3, 0.8) * seconds)
        if process.poll() is None:
            with spoilt(process.pid, fault), suppress(subprocess.TimeoutExpired):
                process.wait(HOLD if fault in GOES_ON else BACK)
    said = process.communicate(timeout=BACK)[0]
    done = process.returncode == 0
    assert done or fault not in GOES_ON, said
    assert "Traceback" not in said
    assert process.returncode != 1 or "error: " in said
    assert whole(site, phase, spoilt_) or not done
    again = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, timeout=BACK)
    again = time.monotonic() - again
    assert whole(site, phase, spoilt_)
    if phase != "sign":  # whose signatures have chance in them
        assert contents(spoilt_) == contents(good)
    assert [each.name for each in spoilt_.parent.iterdir()] == ["output"]
    rows[cell] = f"{'done' if done else f'exit {process.returncode}'}, {again:.0f} s"


# --- servers --------------------------------------------------------------------------------------


@dataclass
class Asking:
    """Clients that ask without end, over all roads."""

    served: Served
    expected: Expected
    jobs: list[Job]
    came: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._client(i) for i in range(CLIENTS)))

        asyncio.run(all_of_them())

    async def _client(self, name: int) -> None:
        dice = random.Random(name)
        async with Client(self.served.ports.grpc, self.served.ports.http) as client:
            while not self.over.is_set():
                job = dice.choice(self.jobs)
                try:
                    parts = await asyncio.wait_for(ask_all(client, job), load.WAIT + 5)
                    self.expected.check(job, parts)
                    self.came["right"] += 1
                except RefusedError as error:
                    self.came[error.code] += 1
                    await asyncio.sleep(0.2)
                except Exception as error:  # a wrong answer, or none
                    self.wrong.append(f"{job}: {error!r}")

    def more(self, count: int) -> None:
        deadline, count = time.monotonic() + BACK, self.came["right"] + count
        while self.came["right"] < count:
            assert time.monotonic() < deadline, (self.came, self.wrong)
            assert not self.wrong
            time.sleep(0.05)


@contextmanager
def asking(served: Served, site: Site, phase: str) -> Iterator[Asking]:
    prompts = sorted(site.prompts, key=len)
    long = phase == "prefill"
    jobs = [
        Job(i, road, prompt, 1 if long else LONGEST_TEXT)
        for i, prompt in enumerate(prompts[-8:] if long else prompts[:8])
        for road in load.ROADS
    ]
    clients = Asking(served, site.expected, jobs)
    thread = threading.Thread(target=clients.run)
    thread.start()
    try:
        yield clients
    finally:
        clients.over.set()
        thread.join(2 * load.WAIT)
    assert not thread.is_alive()
    assert not clients.wrong, clients.wrong[:3]


def find(served: Served, process: str, old: set[int]) -> int:
    """The process id of a process, once it is there; old: those that do not count."""
    deadline = time.monotonic() + BACK
    while time.monotonic() < deadline:
        for pid in family(served.process.pid) - old:
            if name_of(pid) == process and (process != "serve" or pid == served.process.pid):
                return pid
        time.sleep(0.02)
    raise AssertionError(f"no {process}")


def answers(served: Served, site: Site) -> bool:
    """Whether it answers over every road, rightly."""

    async def ask() -> None:
        async with Client(served.ports.grpc, served.ports.http) as client:
            for job in (Job(i, road, site.prompts[1], 8) for i, road in enumerate(load.ROADS)):
                site.expected.check(job, await asyncio.wait_for(ask_all(client, job), load.WAIT))

    try:
        asyncio.run(ask())
    except RefusedError:
        return False
    return True


def wait_until(served: Served, done: Callable[[], bool]) -> bool:
    """False: `serve` has ended."""
    deadline = time.monotonic() + BACK
    while not done():
        if served.process.poll() is not None:
            return False
        assert time.monotonic() < deadline, served.lines()
        time.sleep(0.1)
    return True


def swap(served: Served, build: Path) -> None:
    with suppress(ServerError):  # it says so to who asked; the old build serves on
        list(call(served.ports.http, {"build": str(build), "least": 0.0, "drain": 30.0}))


def within(folder: Path, size: str) -> list[str]:
    """Words before a command: it sees a small, empty file system in that folder."""
    words = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*words, "true"]).returncode:
        pytest.skip("no mount namespace may be made here")
    return [*words, "sh", "-c", f'mount -t tmpfs -o size={size} x {folder} && exec "$@"', "sh"]


def spoil(cell: Cell, served: Served, pid: int, folder: Path) -> float:
    """Has the fault, for its time; when it was over, or when a process was told to end."""
    served.look()
    begun = time.monotonic()
    if cell.fault == "clock":
        for days in (1, -2, 0):
            set_clock(folder, days)
            time.sleep(HOLD / 3)
        return time.monotonic()
    if cell.process == "machine":
        context = full(Path(f"/proc/{pid}/root{folder}"))
    elif cell.process == "client":
        context = bad_clients(served.ports.http, cell.fault)
    else:
        context = spoilt(pid, cell.fault)
    with context:
        time.sleep(0 if cell.fault in ENDS else HOLD)
    return begun if cell.fault in ENDS else time.monotonic()


def spoil_starting(cell: Cell, served: Served, folder: Path) -> float:
    if cell.process == "machine":  # it is spoilt from the beginning
        return time.monotonic()
    pid = find(served, cell.process, set())
    if cell.phase == "measuring":
        wait_until(served, lambda: MEASURES in served.log())
    else:
        time.sleep(random.Random(str(cell)).uniform(0, 2))
    return spoil(cell, served, pid, folder)


def spoil_serving(cell: Cell, served: Served, site: Site, folder: Path) -> tuple[float, bool]:
    """Seconds until it served again, or had ended, and whether it serves."""
    there, swapping = family(served.process.pid), threading.Thread()
    known = cell.process not in ("machine", "client")
    pid = find(served, cell.process.removeprefix("old ") if known else "serve", set())
    if cell.phase == "swap":
        swapping = threading.Thread(target=swap, args=(served, site.builds[1]))
        swapping.start()
        new = find(served, "tritonserver", there)
        if cell.process in ("tritonserver", "dflash"):
            pid = new if cell.process == "tritonserver" else find(served, "dflash", there)
        time.sleep(random.Random(str(cell)).uniform(0, 2))
    elif cell.phase == "drain":
        served.process.terminate()
    at = spoil(cell, served, pid, folder)
    ends = cell.phase == "drain" or (cell.process == "serve" and cell.fault in ENDS)
    serves = wait_until(served, lambda: not ends and answers(served, site))
    seconds = time.monotonic() - at
    if cell.phase == "swap":
        swapping.join(BACK)
        assert not swapping.is_alive()
    return seconds, serves


@pytest.mark.parametrize("cell", share(OF_SERVER), ids=str)
def test_a_server(cell: Cell, site: Site, rows: dict[Cell, str], tmp_path: Path) -> None:
    phase, process, fault = cell
    build, environment, before = site.builds[0], {"TMPDIR": str(tmp_path)}, list[str]()
    folder = SHARED_MEMORY if fault == "shm" else tmp_path
    if fault == "clock":
        environment |= make_clock(tmp_path)
        set_clock(tmp_path, -400 if phase == "start" else 0)
    elif process == "machine":
        before = within(folder, "64k" if phase == "start" else "64m")
    if phase == "measuring":
        (build / "engines" / COSTS_FILE).unlink(missing_ok=True)
    came = Counter[str]()

    with watched(build, before, **environment) as served:
        if phase in ("start", "measuring"):
            at = spoil_starting(cell, served, folder)
            serves = wait_until(served, lambda: answers(served, site))
            seconds = time.monotonic() - at
        else:
            served.wait_for("Ctrl-C")
            with asking(served, site, phase) as asked:
                asked.more(FIRST)
                seconds, serves = spoil_serving(cell, served, site, folder)
                if serves:
                    asked.more(FIRST)
                came = asked.came
        if serves:
            goes_idle(served.ports)
            assert wait_until(served, lambda: one_of_each(served))
        served.look()
        served.process.terminate()
        code = served.process.wait(BACK)
        said = served.lines()
    assert "Traceback" not in said, said
    assert code == 0 or "error: " in said or (process == "serve" and fault in ENDS), (code, said)
    assert serves or phase in ("start", "measuring", "drain") or process == "serve", said
    # Triton ends a model that does not answer for a second
    steady = (fault in GOES_ON and process not in MODELS) or process == "client"
    if phase in ("prefill", "decode") and steady:
        assert came.keys() == {"right"}, came
    deadline = time.monotonic() + BACK
    while any(
        processes_naming(each) or [*SHARED_MEMORY.glob(f"{each}*")] for each in served.regions
    ):
        assert time.monotonic() < deadline, "something is left behind"
        time.sleep(0.2)
    how = "restarted" if RESTARTED.search(said) else "served on" if serves else f"exit {code}"
    if not serves:  # the same command works
        again = time.monotonic()
        with watched(build, TMPDIR=str(tmp_path)) as after:
            assert wait_until(after, lambda: answers(after, site)), after.lines()
        seconds = time.monotonic() - again
    errors = ", ".join(f"{count} {code}" for code, count in sorted(came.items()) if code != "right")
    rows[cell] = f"{how}, {seconds:.0f} s" + (f" ({errors})" if errors else "")


def one_of_each(served: Served) -> bool:
    names = Counter(map(name_of, family(served.process.pid)))
    return all(names[name] == 1 for name in ("gateway", "tritonserver", "dflash", "reaper"))
