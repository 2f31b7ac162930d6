"""Supervisor: detects dead or hanging processes and restarts the server until it is ready.

Triton stays ready when a model process dies, and clients of a dead `dflash` would wait forever. So
the processes themselves are watched, and whether requests make progress.
"""

import queue
import threading
import time

from dflash_trt.errors import ServerError
from dflash_trt.serving.server.application import Application
from dflash_trt.serving.server.process import Say, Server

POLL = 0.25  # seconds between two looks at the processes
PROBE_INTERVAL = 10.0  # seconds between checks that requests make progress, and per check
HANG_TIMEOUT = 60.0  # seconds without a round
DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before consecutive restarts; then 30
HEALTHY = 120.0  # seconds of service after which the count of restarts begins again


def supervise(server: Server, application: Application, stop: threading.Event, say: Say) -> None:
    """Watch a ready server until `stop` is set; tell the application when readiness changes.

    Whatever died, the whole server is restarted: `verify` and `draft` hold the KV caches of all
    requests, and clients of a dead `dflash` or `dflash_infer` would never get an answer.
    """
    restarts, since = 0, time.monotonic()
    while (problem := _wait_for_problem(server, application, stop, say)) is not None:
        application.tell("unready")
        if time.monotonic() - since > HEALTHY:
            restarts = 0
        while not _restart(server, problem, restarts, stop, say):
            if stop.is_set():
                return
            restarts += 1
        restarts, since = restarts + 1, time.monotonic()
        application.tell("ready")


def _restart(server: Server, problem: str, restarts: int, stop: threading.Event, say: Say) -> bool:
    delay = DELAYS[min(restarts, len(DELAYS) - 1)]
    when = f"in {delay:.0f} s" if delay else "now"
    say(f"{problem}; restarting the server {when} (restart {restarts + 1} in a row)")
    start = time.monotonic()
    try:
        server.kill()  # at once: nobody answers the running requests
        if stop.wait(delay):
            return False
        server.start()
        if not server.wait_ready(stop, say):
            return False
    except (ServerError, OSError) as error:  # for example no process or file descriptor left
        say(f"the restart failed: {error}")
        return False
    say(f"the server is ready again after {time.monotonic() - start:.1f} s")
    return True


def _wait_for_problem(
    server: Server, application: Application, stop: threading.Event, say: Say
) -> str | None:
    over = threading.Event()
    hangs: queue.SimpleQueue[str] = queue.SimpleQueue()
    arguments = (server, application, over, hangs)
    threading.Thread(target=_watch_requests, args=arguments, daemon=True).start()
    try:
        while not stop.wait(POLL):
            if (problem := server.ended()) is not None:
                return problem
            if not hangs.empty():
                return hangs.get()
            try:
                if (code := application.poll()) is not None:
                    say(f"the application ended (exit {code}); starting another")
                    application.start(server.log)
            except (OSError, ServerError) as error:
                say(f"{error} It is tried again.")
                stop.wait(DELAYS[-1])
    finally:
        over.set()
    return None


def _watch_requests(
    server: Server, application: Application, over: threading.Event, hangs: "queue.SimpleQueue[str]"
) -> None:
    """Report when no round succeeds although one was requested.

    A server that has processed tokens since the last look is not asked for a round. A refusal
    proves nothing: the queue is also full when rounds hang.
    """
    last, ready, progress = time.monotonic(), True, None
    while not over.wait(PROBE_INTERVAL):
        status = server.send_command("status")
        before, progress = progress, status and status.progress
        progressed = progress is not None and progress != before
        answered = progressed or server.health.probe(PROBE_INTERVAL) == 200
        now = time.monotonic()
        last = now if answered else last
        if over.is_set():
            return
        if ready != answered:
            ready = answered
            application.tell("ready" if ready else "unready")
        if now - last > HANG_TIMEOUT:
            hangs.put(f"no round for {now - last:.0f} s")
            return
