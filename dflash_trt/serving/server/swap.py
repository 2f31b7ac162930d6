"""Another build in place of the one that is served, and no request lost.

A second Triton is started beside the running one and proved; then the gateway sends new requests
to it, and the old one ends when nobody is left there. Where only the drafter differs, Triton loads
only it, beside the old one, in the server that runs: drafts decide no text.
"""

import os
import threading
import time
from pathlib import Path
from typing import Self

from dflash_trt.build import Depth, read_manifest
from dflash_trt.build.signing import check_signed
from dflash_trt.errors import DflashError, ServerError
from dflash_trt.machine import usable_cores
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.server.calls import Call, Caller, Tell
from dflash_trt.serving.server.cores import follows_cores, watch_cores
from dflash_trt.serving.server.gateway import Gateway
from dflash_trt.serving.server.process import DRAFTER, Server, find_repository
from dflash_trt.serving.server.proof import acceptance, check_memory, prove, same_but_drafter
from dflash_trt.serving.server.supervisor import Say, supervise

POLL = 0.25  # seconds between two looks at who is left
IDLE = 5.0  # seconds without a sequence, after which connections that are held open are closed
DRAIN = 600.0  # seconds for the requests of a server that takes other cores than it should
END_TIMEOUT = 5.0  # seconds until a swap that is under way has ended, when `serve` stops


class Swaps:
    """The server of the moment, which is another one after a swap.

    As a context manager it runs the server that it is given, and ends whatever runs at the end.
    check, key: how each next build is looked at, as `serve` does it.
    """

    def __init__(
        self, server: Server, gateway: Gateway, say: Say, check: Depth | None, key: Path | None
    ) -> None:
        self.server = server
        self.stop = threading.Event()
        self._gateway, self._say, self._check, self._key = gateway, say, check, key
        self._left = threading.Event()  # ends the watch over the server
        self._going = threading.Lock()  # held while there is another server, or none, to watch
        self._last: Path | None = None  # the build before this one
        self._manifest = read_manifest(server.repository.parent)  # its directory may be built anew
        self._proved: float | None = None  # acceptance of the build that is served, once measured
        self._caller: Caller | None = None

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        if self._caller is not None:
            self._caller.close(END_TIMEOUT)
        self.server.__exit__(None, None, None)

    def start(self, http_port: int) -> None:
        """Watches the server and what cores there are, and takes calls meanwhile."""
        self._watch()
        self._caller = Caller(http_port, self._do)
        arguments = (self._processes, self._cores, self._take, self.stop.wait)
        threading.Thread(target=watch_cores, args=arguments, daemon=True).start()

    def wait(self) -> None:
        """Until `stop` is set."""
        self.stop.wait()
        with self._going:
            self._leave()

    def _watch(self) -> None:
        def watch() -> None:
            try:
                supervise(self.server, self._gateway, self._left, self._say)
            finally:
                if not self._left.is_set():  # it failed
                    self.stop.set()

        self._left.clear()
        self._watching = threading.Thread(target=watch, daemon=True)
        self._watching.start()

    def _leave(self) -> None:
        self._left.set()
        self._watching.join()

    # --- in the thread that watches the cores -----------------------------------------------------

    def _processes(self) -> list[int]:
        return [os.getpid(), self._gateway.pid, self.server.process.pid]

    def _cores(self) -> int:
        return self.server.cores or usable_cores()

    def _take(self, cores: int) -> None:
        """The same build again, with other threads: they are set once in a process."""
        build = self.server.repository.parent
        if not follows_cores(build):
            return
        self._say(f"cores: others leave {cores}, and engines take {self._cores()}; a swap follows")
        try:
            assert self._caller is not None
            self._caller.alone(lambda: self._swap_all(build, 0.0, DRAIN, self._say, cores))
        except (DflashError, OSError) as error:  # such as no process or file descriptor left
            self._say(f"cores: {self._cores()} stay in use: {error}")

    # --- in the thread of a call ------------------------------------------------------------------

    def _do(self, call: Call, tell: Tell) -> None:
        """A swap; call: `build`, or None for the last one, which need not be faster; `least`: see
        `prove`; `drain`: seconds that the old build's requests have."""

        def say(line: str) -> None:
            self._say(line)
            tell(line)

        build = Path(call["build"]) if call["build"] else self._last
        if build is None:
            raise ServerError("no other build was served before", "Give one: dflash-trt swap BUILD")
        try:
            build = find_repository(build).parent
            check_signed(build, self._check, self._key)
            old, least = self.server.repository.parent, call["least"] if call["build"] else 0.0
            say(f"swap: from {old} to {build}")
            manifest = read_manifest(build)
            if same_but_drafter(self._manifest, manifest):
                self._swap_drafter(build, least, say)
            else:
                self._swap_all(build, least, call["drain"], say)
        except DflashError as error:
            self._say(f"swap: failed, and {self.server.repository.parent} serves on: {error}")
            raise ServerError(error.problem, error.fix) from None
        self._last, self._manifest = old, manifest

    def _swap_all(
        self, build: Path, least: float, drain: float, say: Say, cores: int | None = None
    ) -> None:
        """cores: that its engines take; None: as many as the old ones."""
        old = self.server
        cores = cores or old.cores
        check_memory([old.process.pid, *old.stubs()], old.repository.parent, build)
        server = Server(build, free_ports(), old.security, old.log, keep_log=True, cores=cores)
        server.__enter__()
        try:
            if not server.wait_ready(self.stop, say):
                raise STOPPED
            found = prove(server, self._acceptance(), least, say)
            self._go_over(server)
            self._proved = found
            say(f"swap: {build} serves; {old.repository.parent} drains")
        finally:
            if self.server is not server:
                server.kill()
                server.__exit__(None, None, None)
        self._drain(old, drain)
        say(f"swap: {old.repository.parent} has ended")

    def _go_over(self, server: Server) -> None:
        """New requests go there, and it is watched; a restart of the old one is given up."""
        with self._going:
            if self.stop.is_set():
                raise STOPPED
            self._leave()
            try:
                self._gateway.move(server.repository.parent, server.ports)
                self.server = server
                self._gateway.tell("ready")
            finally:
                self._watch()

    def _acceptance(self) -> float:
        if self._proved is None:
            self._proved = acceptance(self.server)
        return self._proved

    def _drain(self, old: Server, seconds: float) -> None:
        """Waits until nobody is left, and ends it; no longer than that for what has crashed."""
        busy = time.monotonic()
        deadline = busy + seconds
        while not self._gateway.left(POLL) and old.ended() is None:
            status, now = old.control.ask("status"), time.monotonic()
            if status is None or status.open:
                busy = now
            if now > min(deadline, busy + IDLE):
                break
        if old.ended() is not None or self.stop.is_set():
            old.kill()
        old.__exit__(None, None, None)

    def _swap_drafter(self, build: Path, least: float, say: Say) -> None:
        """Triton's own reload: the next `draft` is loaded beside the old one, which then ends.

        It is proved in place: a drafter decides how fast a text comes, not which. A restart
        meanwhile starts the old one.
        """
        server, old = self.server, self.server.repository.parent
        drafters = [pid for pid, model in server.stubs().items() if model == DRAFTER]
        check_memory(drafters, old, build, "engines/drafter")
        last, process = self._acceptance(), server.process
        with server.reloading(DRAFTER):
            server.load_drafter(build)
            try:
                found = prove(server, last, least, say)
                if server.process is not process:  # the old drafter was started again
                    raise ServerError("the server died meanwhile", "Try it again")
            except ServerError:
                server.load_drafter(old)
                raise
        self._proved = found
        server.repository = build / "model_repository"  # what a restart starts
        say(f"swap: {build} serves; its drafter was loaded, and nothing else")


STOPPED = ServerError("`serve` is stopping", "Start it with the build it is to serve")
