"""What the gateway is told on its standard input, as one line of JSON."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import Security

LISTENING = "listening"  # what it answers


@dataclass(frozen=True)
class Settings:
    """listeners: file descriptors of listening sockets: `http`, `grpc` and perhaps `openai`."""

    listeners: dict[str, int]
    directory: Path  # the build, for the OpenAI door
    triton: Ports  # where Triton listens, HTTP and gRPC on this machine only
    security: Security


codec = TypeAdapter(Settings)
