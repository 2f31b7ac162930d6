"""How the server is reached: its address and TLS."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dflash_trt.errors import RequestError, ServerError

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # else a channel that failed once answers retries from memory for a second and longer
    ("grpc.initial_reconnect_backoff_ms", 100),
    # its name for the time that a connection may take: 100 ms were too few where a machine is busy
    ("grpc.min_reconnect_backoff_ms", 10_000),
]


@dataclass(frozen=True)
class Tls:
    """PEM files; without a root certificate those of the system are trusted.

    server_name: what the server's certificate must name; None: the address's host.
    """

    root_certificate: Path | None = None
    client_key: Path | None = None
    client_certificate: Path | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ServerError when a file cannot be read."""
        files = (self.root_certificate, self.client_key, self.client_certificate)
        try:
            return grpc.ssl_channel_credentials(*(file and file.read_bytes() for file in files))
        except OSError as error:
            raise ServerError(
                f"cannot read {error.filename}: {error.strerror}", "Give a readable PEM file"
            ) from error


def to_address(url: str) -> str:
    """HOST:PORT of HOST:PORT or grpc://HOST:PORT; RequestError for an address of HTTP."""
    if url.startswith(("http://", "https://")):
        raise RequestError(
            f"{url} is an address for HTTP, and requests go over gRPC",
            "Give HOST:PORT of the server's gRPC port, such as 127.0.0.1:8001",
        )
    return url.removeprefix("grpc://")


def open_channel(transport: Any, address: str, tls: Tls | None) -> Any:
    """A channel of `transport`, which is `grpc` or `grpc.aio`."""
    if tls is None:
        return transport.insecure_channel(address, CHANNEL_OPTIONS)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return transport.secure_channel(address, tls.credentials(), [*CHANNEL_OPTIONS, *name])
