"""The HTTP application: OpenAI's API, Triton's, the metrics and the page, on one port."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import Security

LISTENING = "listening"  # printed by the process when it serves


@dataclass(frozen=True)
class ApplicationSettings:
    listener: int  # file descriptor of the listening socket
    directory: Path  # the build
    triton: Ports  # where Triton listens
    security: Security
    since: str = ""  # when `serve` began, ISO 8601
    root_path: str = ""  # of a server behind an ingress, without a slash at its end
    response_store: int = 64  # MiB of answers kept for `/v1/responses`; 0: none


Phase = Literal["unready", "ready", "leaving", "draining"]
"""leaving: readiness is false, so that proxies turn away, but every request is answered."""


@dataclass(frozen=True)
class ServedDrafter:
    """A drafter that `update-drafter` put in the place of the build's."""

    name: str  # of its build
    digest: str
    since: str  # ISO 8601


@dataclass(frozen=True)
class ServeState:
    """What `serve` tells the application: a line of JSON at each change."""

    phase: Phase = "unready"
    keys: tuple[str, ...] = field(default=(), repr=False)  # of which clients must send one
    drain_seconds: float = 0.0  # for running requests, with `draining`
    server_restarts: int = 0
    application_restarts: int = 0
    lost_lines: int = 0  # of the log
    drafters: tuple[ServedDrafter, ...] = ()  # the last one serves


codec = TypeAdapter(ApplicationSettings)
state_codec = TypeAdapter(ServeState)
