"""`dflash-trt serve` as a process that may fail: what it says, and when."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from live import serve_command
from load import WAIT, metric
from processes import family, prefixes_of

from dflash_trt.serving.ports import Ports, free_ports


@dataclass
class Served:
    built: Path
    ports: Ports
    process: subprocess.Popen[str]
    said: list[tuple[float, str]] = field(default_factory=list)
    regions: set[str] = field(default_factory=set)  # how the names of its shared memory begin

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((time.monotonic(), line.rstrip()))

    def look(self) -> None:
        """Which shared memory its processes name now."""
        self.regions |= prefixes_of(family(self.process.pid))

    def when(self, words: str) -> float | None:
        """When it said a line with `words`, last."""
        return next((at for at, line in reversed(self.said) if words in line), None)

    def lines(self) -> str:
        return "\n".join(line for _, line in self.said)

    def log(self) -> str:
        """What its processes wrote so far."""
        found = re.search(r"\(log: (.+)\)", self.lines())
        return Path(found[1]).read_text(errors="replace") if found else ""

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + 3 * WAIT  # a busy machine starts slowly
        while self.when(words) is None:
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)


@contextmanager
def watched(built: Path, before: Sequence[str] = (), **environment: str) -> Iterator[Served]:
    """It begins to start, and is gone when the block ends; before: words before the command."""
    ports = free_ports()
    process = subprocess.Popen(
        [*before, *serve_command(built, ports)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    served = Served(built, ports, process)
    reader = threading.Thread(target=served.read)
    reader.start()
    try:
        yield served
    except BaseException:
        print(f"{served.lines()}\n{served.log()[-6000:]}")
        raise
    finally:
        process.terminate()  # it cleans up
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAIT)
        process.kill()
        reader.join(WAIT)
        process.communicate()


def goes_idle(ports: Ports) -> None:
    """All rows are free and nobody waits."""
    names = ("trtllm_num_requests_running", "trtllm_num_requests_waiting", "dflash_kv_rows_used")
    deadline = time.monotonic() + WAIT
    while True:
        state = {name: sum(metric(ports.metrics, name).values()) for name in names}
        if not any(state.values()):
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
