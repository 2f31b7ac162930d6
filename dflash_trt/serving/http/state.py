"""Whether the application takes requests: what `serve` says, the running ones, and draining."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from dflash_trt.serving.http import ServeState
from dflash_trt.serving.http.connections import Connections

NOT_READY = "The server is not ready. Try again later."
STOPPING = "The server is stopping. Try again later."


@dataclass
class State:
    """Whether the server takes requests, and the running ones."""

    connections: Connections
    serve: ServeState = field(default_factory=ServeState)
    draining: bool = False
    # by HTTP status; one is there from the start, as Prometheus wants
    answers: Counter[int] = field(default_factory=lambda: Counter({200: 0}))
    running: set["asyncio.Task[None]"] = field(default_factory=set)
    buffered: int = 0  # bytes of bodies
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_ready(self) -> bool:
        """Whether proxies should send requests here."""
        return self.serve.phase == "ready" and not self.draining

    @property
    def reason_to_refuse(self) -> str:
        if self.draining:
            return STOPPING
        return "" if self.serve.phase in ("ready", "leaving") else NOT_READY

    def change(self, serve: ServeState) -> None:
        self.serve = serve
        if serve.phase == "draining":
            self.drain(serve.drain_seconds)

    def drain(self, seconds: float) -> None:
        """Refuse new requests; set `drained` when none runs, or after the time."""
        self.draining = True
        asyncio.get_running_loop().call_later(seconds, self.drained.set)
        self._set_if_drained()

    def leave(self, task: "asyncio.Task[None]") -> None:
        self.running.discard(task)
        self._set_if_drained()

    def cancel_running(self) -> None:
        self.draining = True
        for task in self.running:
            task.cancel()

    def _set_if_drained(self) -> None:
        if self.draining and not self.running:
            self.drained.set()
