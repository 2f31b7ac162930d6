"""Builds to swap, and clients that count what they get meanwhile."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from builds import edit_weights, quiet
from dflash_trt.serving.server.reaper import processes_naming
from pycode import PYCODE, demo_config

from dflash_trt.build.run import build
from dflash_trt.errors import DflashError
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports

PROMPT, TOKENS = "def main():", 48
WAIT = 120.0  # seconds; nothing here should take so long


def build_changed(directory: Path, role: str, scale: float) -> Path:
    """The demo pair with noise of that share in the matrices of one model, built."""
    import torch  # noqa: PLC0415

    changed = shutil.copytree(PYCODE / role, directory / role)

    def change(tensors: dict[str, Any]) -> None:
        torch.manual_seed(0)
        for name, each in tensors.items():
            if each.ndim == 2:
                noise = torch.randn(each.shape) * each.float().std() * scale
                tensors[name] = each + noise.to(each.dtype)

    edit_weights(changed, change)
    config = demo_config()
    source = getattr(config, role).model_copy(update={"path": changed})
    build(config.model_copy(update={role: source}), directory / "built", quiet)
    return directory / "built"


def servers_of(pid: int) -> list[int]:
    """The tritonserver processes that the process `pid` has started."""
    parents = dict[int, int]()
    for server in processes_naming("--model-repository="):
        with suppress(OSError):  # it has ended
            status = Path(f"/proc/{server}/status").read_text()
            parents[server] = int(status.split("PPid:")[1].split()[0])
    return [server for server, parent in parents.items() if parent == pid]


@dataclass
class Clients:
    """Each asks the same again and again, and each request until it is answered.

    retries: those of our client, which repeats what has not begun to be answered.
    """

    ports: Ports
    retries: int = 0
    answers: list[tuple[float, str]] = field(default_factory=list)  # when, and the text
    # attempts that failed: begun, ended, what
    errors: list[tuple[float, float, str]] = field(default_factory=list)
    asked: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def texts(self) -> set[str]:
        return {text for _, text in self.answers}

    def run(self, ask: Callable[[], str]) -> None:
        while not self.stop.is_set():
            self.asked += 1
            self.answers.append(self._answer(ask, time.monotonic() + WAIT))

    def _answer(self, ask: Callable[[], str], deadline: float) -> tuple[float, str]:
        while True:
            begun = time.monotonic()
            try:
                return begun, ask()
            except (httpx.HTTPError, DflashError) as error:
                self.errors.append((begun, time.monotonic(), repr(error)))
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def over_grpc(self, *, stream: bool) -> None:
        options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
        with Client(f"127.0.0.1:{self.ports.grpc}", retries=self.retries) as client:
            if stream:
                self.run(lambda: "".join(c.text for c in client.stream(PROMPT, **options)))
            else:
                self.run(lambda: client.generate(PROMPT, **options).choices[0].text)

    def over_http(self, *, stream: bool) -> None:
        body = {"text_input": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
        url = f"http://127.0.0.1:{self.ports.http}/v2/models/dflash/generate"
        with httpx.Client(timeout=WAIT) as client:
            self.run(lambda: read(client.post(url + "_stream" * stream, json=body)))


def read(answer: httpx.Response) -> str:
    """The text of an answer or a stream; HTTPError for anything else."""
    answer.raise_for_status()
    lines = answer.text.removeprefix("data: ").split("\n\ndata: ")
    events = [httpx.Response(200, text=line).json() for line in lines]
    if any("error" in event for event in events) or events[-1].get("finish_reason") != "length":
        raise httpx.ReadError(answer.text[-200:])
    return "".join(event["text_output"] for event in events)


@contextmanager
def asking(ports: Ports, count: int, retries: int = 0) -> Iterator[Clients]:
    """So many clients of four kinds, until the block ends; each request was answered once."""
    clients = Clients(ports, retries)
    kinds = [clients.over_grpc, clients.over_http]
    threads = [
        threading.Thread(target=kinds[i % 2], kwargs={"stream": i % 4 < 2}) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        clients.stop.set()
        for thread in threads:
            thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    assert clients.asked == len(clients.answers), clients.errors[-3:]
