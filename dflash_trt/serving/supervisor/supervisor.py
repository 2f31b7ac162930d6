"""Supervisor: detects dead or hanging processes and restarts the server until it is ready.

Triton stays ready when a model process dies, and clients of a dead `dflash` would wait forever. So
the processes themselves are watched, and whether requests make progress by the way of clients.
"""

import queue
import threading
import time
from dataclasses import dataclass

from dflash_trt.errors import BuildError, ServerError
from dflash_trt.serving.supervisor.application import Application
from dflash_trt.serving.supervisor.clients import OK, ApplicationClient
from dflash_trt.serving.supervisor.process import Say, Server
from dflash_trt.serving.supervisor.ranks import is_launched
from dflash_trt.serving.supervisor.upkeep import Upkeep

POLL = 0.25  # seconds between two looks at the processes
PROBE_INTERVAL = 10.0  # seconds between checks that requests make progress, and per check
ALIVE_TIMEOUT = 10.0  # seconds for the application to answer anything
HANG_TIMEOUT = 60.0  # seconds without a round, or without an answer of the application
DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before consecutive restarts; then 30
HEALTHY = 120.0  # seconds of service after which the count of restarts begins again


@dataclass(frozen=True)
class Supervised:
    """What `serve` watches."""

    server: Server
    application: Application
    client: ApplicationClient
    upkeep: Upkeep
    say: Say


def supervise(watched: Supervised, stop: threading.Event) -> None:
    """Watch a ready server until `stop` is set; tell the application when readiness changes.

    Whatever died, the whole server is restarted: `verify` and `draft` hold the KV caches of all
    requests, and clients of a dead `dflash` or `dflash_infer` would never get an answer.
    """
    application = watched.application
    restarts, since = 0, time.monotonic()
    while (problem := _wait_for_problem(watched, stop)) is not None:
        application.tell("unready")
        if is_launched():
            raise ServerError(
                f"{problem}, and ranks of a launched job cannot start again",
                "Start the job again: sbatch --requeue does that",
            )
        if time.monotonic() - since > HEALTHY:
            restarts = 0
        while not _restart(watched, problem, restarts, stop):
            if stop.is_set():
                return
            restarts += 1
        restarts, since = restarts + 1, time.monotonic()
        application.tell("ready")


def _restart(watched: Supervised, problem: str, restarts: int, stop: threading.Event) -> bool:
    server, say = watched.server, watched.say
    delay = DELAYS[min(restarts, len(DELAYS) - 1)]
    when = f"in {delay:.0f} s" if delay else "now"
    say(f"{problem}; restarting the server {when} (restart {restarts + 1} in a row)")
    start = time.monotonic()
    watched.application.count_server_restart()
    try:
        server.kill()  # at once: nobody answers the running requests
        if _is_stopped_within(delay, watched, stop):
            return False
        server.start()
        if not server.wait_ready(stop, say, watched.client.probe, watched.upkeep.look):
            return False
    except (
        BuildError,
        ServerError,
        OSError,
    ) as error:  # for example no process or file descriptor left
        say(f"the restart failed: {error}")
        return False
    say(f"the server is ready again after {time.monotonic() - start:.1f} s")
    return True


def _is_stopped_within(seconds: float, watched: Supervised, stop: threading.Event) -> bool:
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if stop.wait(POLL):
            return True
        watched.upkeep.look()
    return stop.is_set()


def _wait_for_problem(watched: Supervised, stop: threading.Event) -> str | None:
    over = threading.Event()
    hangs: queue.SimpleQueue[str] = queue.SimpleQueue()
    arguments = (watched, over, hangs)
    threading.Thread(target=_watch_requests, args=arguments, daemon=True).start()
    try:
        while not stop.wait(POLL):
            if (problem := watched.server.ended()) is not None:
                return problem
            if not hangs.empty():
                return hangs.get()
            watched.upkeep.look()
    finally:
        over.set()
    return None


def _watch_requests(
    watched: Supervised, over: threading.Event, hangs: "queue.SimpleQueue[str]"
) -> None:
    """Report when no round succeeds although one was requested; end an application that hangs.

    A server that has processed tokens since the last look, or that loads a drafter, is not asked
    for a round. A refusal proves nothing: the queue is also full when rounds hang.
    """
    server, application, client = watched.server, watched.application, watched.client
    last_alive = last_round = time.monotonic()
    ready, progress = True, None
    while not over.wait(PROBE_INTERVAL):
        alive = client.is_alive(ALIVE_TIMEOUT)
        status = server.send_command("status")
        before, progress = progress, status and status.progress
        progressed = progress is not None and progress != before
        runs = progressed or server.loads_drafter
        answered = alive and (runs or client.probe(PROBE_INTERVAL) == OK)
        if over.is_set():
            return
        now = time.monotonic()
        if alive:
            last_alive = now
        if answered or not alive:  # rounds cannot be asked for through an application that hangs
            last_round = now
        if ready != answered:
            ready = answered
            application.tell("ready" if ready else "unready")
        if now - last_alive > HANG_TIMEOUT:
            watched.say(f"the application has not answered for {now - last_alive:.0f} s; ending it")
            application.kill()
            last_alive = now
        if now - last_round > HANG_TIMEOUT:
            hangs.put(f"no round for {now - last_round:.0f} s")
            return
