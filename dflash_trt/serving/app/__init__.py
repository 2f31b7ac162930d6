"""The HTTP application: OpenAI's API, Triton's, the metrics and the page, on one port."""

from dataclasses import dataclass
from pathlib import Path

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
    response_store: int = 64  # MiB of answers kept for `/v1/responses`; 0: none


codec = TypeAdapter(ApplicationSettings)
