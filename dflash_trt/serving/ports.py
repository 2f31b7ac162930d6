"""Where a server listens."""

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from dflash_trt.errors import ServerError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int


def listen(kind: str, host: str, port: int) -> socket.socket:
    """A listening socket; ServerError where it cannot be. kind: `http` or the like."""
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            raise ServerError(
                f"this machine does not have the address {host}",
                "Give one that it has, or 0.0.0.0 for all: --host ADDRESS",
            ) from None
        raise ServerError(
            f"port {port} ({kind}) is in use or may not be used",
            f"Stop what listens on it, or give another: --{kind}-port PORT",
        ) from None


def free_ports() -> Ports:
    """Three ports of 127.0.0.1 that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def check_ports(ports: Ports) -> None:
    """ServerError unless nothing listens on these ports of this machine."""
    with ExitStack() as stack:  # all at once, so that no two are the same
        for kind, port in vars(ports).items():
            stack.enter_context(listen(kind, LOOPBACK, port))


def reach(host: str) -> str:
    """Where this machine finds what listens on `host`."""
    return LOOPBACK if host == "0.0.0.0" else host
