"""Keeps a server serving: notices what died or hangs, starts it again, gives up in the end.

The server's own readiness does not change when a model process dies, and clients of a front model
that died would wait for ever: the processes themselves are watched, and whether requests get on.
"""

import queue
import threading
import time
from collections.abc import Callable

from dflash_trt.errors import ServerError
from dflash_trt.serving.health import Health
from dflash_trt.serving.process import Server
from dflash_trt.serving.reaper import command_line

POLL = 0.25  # seconds between two looks at the processes
PROBE_INTERVAL = 10.0  # seconds between two looks at whether requests get on
HANG_TIMEOUT = 60.0  # seconds without a round and without an answer
DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before each restart in a row
HEALTHY = 120.0  # seconds of service after which a restart is no longer one of a row


def supervise(server: Server, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Watches a ready server until `stop` is set; raises `ServerError` when it stays broken.

    Whatever died, the whole server is started again: `verify` and `draft` hold the KV caches of all
    requests, and the clients of a dead `dflash` or `dflash_infer` would never hear of it.
    """
    row, since = 0, time.monotonic()
    while (problem := _watch(server, stop)) is not None:
        if time.monotonic() - since > HEALTHY:
            row = 0
        while row < len(DELAYS):
            delay, row = DELAYS[row], row + 1
            when = f"in {delay:.0f} s" if delay else "now"
            say(f"{problem}; restarting the server {when} ({row} of {len(DELAYS)})")
            start = time.monotonic()
            server.kill()  # at once: it ends the requests that nobody answers
            if stop.wait(delay):
                return
            try:
                server.start()
                if not server.wait_ready(stop, say):
                    return
            except ServerError as error:
                problem = error.problem
                continue
            since = time.monotonic()
            say(f"the server is ready again after {since - start:.1f} s")
            break
        else:
            raise ServerError(
                f"{problem}; {len(DELAYS)} restarts in a row did not help",
                f"Read its log: {server.log}",
            )


def _watch(server: Server, stop: threading.Event) -> str | None:
    """Waits for a problem; None when `stop` is set."""
    stubs = server.stubs()
    over = threading.Event()
    hangs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_watch_progress, args=(server.health, over, hangs), daemon=True).start()
    try:
        while not stop.wait(POLL):
            if (code := server.process.poll()) is not None:
                return f"tritonserver ended (exit {code})"
            for pid, model in stubs.items():
                # a process id may have a new owner
                if not any(server.shm_prefix in word for word in command_line(pid)):
                    return f"the process of {model} ended (pid {pid})"
            if not hangs.empty():
                return hangs.get()
    finally:
        over.set()
    return None


def _watch_progress(health: Health, over: threading.Event, hangs: "queue.SimpleQueue[str]") -> None:
    """Reports a server in which no round succeeds, though one is asked for.

    A busy server is not asked: its rounds count. A refusal is no sign of life, since the queue is
    full too when the rounds stand still.
    """
    alive, progress = time.monotonic(), health.progress()
    while not over.wait(PROBE_INTERVAL):
        before, progress = progress, health.progress()
        goes_on = progress is not None and progress != before
        status = 200 if goes_on else health.probe(PROBE_INTERVAL)
        if status == 200:
            alive = time.monotonic()
        elif (silent := time.monotonic() - alive) > HANG_TIMEOUT:
            said = "" if status is None else f", a request gets HTTP status {status}"
            hangs.put(f"no round for {silent:.0f} s{said}")
            return
