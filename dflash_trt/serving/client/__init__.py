"""Call the public model over gRPC: `Client`, `AsyncClient`, or `stream` for a single request."""

from collections.abc import Generator
from typing import Unpack

from dflash_trt.prompts import AnyPrompt
from dflash_trt.request_fields import Options
from dflash_trt.serving.client.clients import AsyncClient, Client
from dflash_trt.serving.client.connection import Tls
from dflash_trt.serving.client.results import Choice, Chunk, Completion, Summary

__all__ = [
    "AnyPrompt",
    "AsyncClient",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Options",
    "Summary",
    "Tls",
    "stream",
]


def stream(url: str, prompt: AnyPrompt, **options: Unpack[Options]) -> Generator[Chunk, None, None]:
    """`Client.stream` with a connection of its own, for a single request."""
    with Client(url) as client:
        yield from client.stream(prompt, **options)
