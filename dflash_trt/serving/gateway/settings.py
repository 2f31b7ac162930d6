"""What the gateway is told on its standard input, and what it answers: a line each."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import Security

LISTENING = "listening"  # what it answers to its first settings
# and to `move SETTINGS`, where new requests are to go: the first or the second, then the third when
# nobody is left at the old place
MOVED, REFUSED, LEFT = "moved", "refused", "left"


@dataclass(frozen=True)
class Settings:
    """listeners: file descriptors of listening sockets: `http`, `grpc`, `metrics` and perhaps
    `openai`."""

    listeners: dict[str, int]
    directory: Path  # the build, for the OpenAI door
    triton: Ports  # where Triton listens, on this machine only
    security: Security
    page: bool = True  # whether the OpenAI door has one


codec = TypeAdapter(Settings)
