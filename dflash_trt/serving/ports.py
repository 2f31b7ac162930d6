"""Ports that a server listens on."""

import random
import socket
from contextlib import suppress
from dataclasses import dataclass

from dflash_trt.errors import ServerError

LOOPBACK, LOOPBACK_IPV6 = "127.0.0.1", "::1"
ANY, ANY_IPV6 = "0.0.0.0", "::"  # the last takes IPv4, too
NOT_GIVEN = range(20000, 32768)
TRIES = 100


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int  # of `serve`: the HTTP port


def listen(kind: str, host: str, port: int) -> socket.socket:
    """Return a listening socket; ServerError if impossible. kind: `http` or the like."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == ANY_IPV6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ServerError(
            f"port {port} ({kind}) of {host} is not free: {error.strerror}",
            f"Stop what listens on it, or give another: --{kind}-port, --host",
        ) from None


def free_ports() -> Ports:
    """Return three free ports of 127.0.0.1, reserved for a minute.

    Linux uses none of these for outgoing connections (`ip_local_port_range` begins at 32768), so
    they stay free until Triton listens. A connection closed from this side leaves its port in
    TIME_WAIT: automatic assignment skips it, listening with SO_REUSEADDR works.
    """
    free: list[int] = []
    for port in random.SystemRandom().sample(NOT_GIVEN, TRIES):
        with suppress(OSError), socket.socket() as listener, socket.socket() as client:
            listener.bind((LOOPBACK, port))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.listen()
            client.connect((LOOPBACK, port))
            listener.accept()[0].close()
            free.append(port)
        if len(free) == 3:
            return Ports(*free)
    raise ServerError("no three ports are free from 20000 to 32767", "Stop what listens on them")


def reachable_address(host: str) -> str:
    """Return an address by which this machine reaches what listens on `host`."""
    return {ANY: LOOPBACK, ANY_IPV6: LOOPBACK_IPV6}.get(host, host)


def in_url(host: str) -> str:
    """Return an address as it stands in a URL, before a port."""
    return f"[{host}]" if ":" in host else host
