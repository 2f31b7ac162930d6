"""Access to the server: address, TLS and keys."""

import ipaddress
import re
import ssl
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from dflash_trt.errors import ServerError
from dflash_trt.serving import client
from dflash_trt.serving.keys import new_key
from dflash_trt.serving.ports import LOOPBACK, LOOPBACK_IPV6, in_url, reachable_address
from dflash_trt.wire import CHANGES

# 26.07; older ones have known holes, even around the keys (CVE-2026-24207, May 2026)
OLDEST_EXPOSED = (2, 71)
# Triton's own HTTP is for `serve` only: all its APIs need a key made at each start
OWN_KEY_HEADER = "own-key"
APIS = (*CHANGES, "model-config", "statistics", "health", "metadata", "inference")
KEY_HEADER = "inference-key"  # sent by Triton's clients
CONNECTION_AGE = 60_000  # ms, with TLS: only Triton can then make clients reconnect
BRACKETED = re.compile(r"\[(.*:.*)\]")  # an IPv6 address
BRACKETED_WITH_PORT = re.compile(rf"{BRACKETED.pattern}(?::\d*)?")
KEY_FORM = re.compile(r"[\w-]{16,256}", re.ASCII)


@dataclass(frozen=True)
class Tls:
    cert: Path  # PEM
    key: Path


@dataclass(frozen=True)
class Security:
    host: str = LOOPBACK  # an IPv4 or IPv6 address
    tls: Tls | None = None  # of gRPC
    http_tls: Tls | None = None
    old_server_exposed: bool = False  # risk accepted by the user
    allow_origin: tuple[str, ...] = ()  # web origins that may call
    allow_host: tuple[str, ...] = ()  # further names of this machine in requests to it
    keys: tuple[str, ...] = field(default=(), repr=False)  # of which clients must send one
    key_file: Path | None = None  # where they come from; it may change
    # shown by `serve` to its Triton, whose APIs for nobody else require it
    own_key: str = field(default_factory=new_key, repr=False)
    client_key: str = field(default_factory=new_key, repr=False)  # see `keys.client_parameters`

    @property
    def exposed(self) -> bool:
        return not ipaddress.ip_address(self.host).is_loopback

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names by which clients may call the server; None: any.

        On loopback without a key, a web page could ask by a name of its own that leads there.
        """
        if self.keys or self.exposed:
            return None
        names = ("localhost", LOOPBACK, LOOPBACK_IPV6, self.host, *self.allow_host)
        return frozenset(map(host_name, names))

    @property
    def grpc_key(self) -> str | None:
        """The first key: Triton takes one."""
        return self.keys[0] if self.keys else None

    @property
    def http_host(self) -> str:
        only_grpc = self.tls is not None and self.http_tls is None
        if not only_grpc:
            return self.host
        return LOOPBACK_IPV6 if ":" in self.host else LOOPBACK

    @property
    def http_url(self) -> str:
        """The application's address for this machine, without its port."""
        scheme = "https" if self.http_tls else "http"
        return f"{scheme}://{in_url(reachable_address(self.http_host))}"

    @property
    def grpc_host(self) -> str:
        """The address of gRPC for this machine, as before its port."""
        return in_url(reachable_address(self.host))

    @property
    def http_headers(self) -> dict[str, str]:
        return {OWN_KEY_HEADER: self.own_key}

    @property
    def grpc_headers(self) -> dict[str, str]:
        key = self.grpc_key
        return {f"triton-grpc-protocol-{KEY_HEADER}": key} if key else {}

    def client_tls(self) -> client.Tls | None:
        return client.Tls(self.tls.cert, certificate_name(self.tls)) if self.tls else None

    def arguments(self) -> list[str]:
        """Return tritonserver's arguments, the only way to pass it keys."""
        arguments = [
            f"--http-restricted-api={','.join(APIS)}:{OWN_KEY_HEADER}={self.own_key}",
            _restrict(CHANGES, "admin-key", self.own_key),
        ]
        if self.grpc_key:
            arguments.append(_restrict(("inference",), KEY_HEADER, self.grpc_key))
        if self.tls:
            arguments += [
                f"--grpc-max-connection-age={CONNECTION_AGE}",
                "--grpc-use-ssl=true",
                f"--grpc-server-cert={self.tls.cert}",
                f"--grpc-server-key={self.tls.key}",
            ]
        return arguments


def read_security(
    host: str,
    *,
    grpc_cert: Path | None = None,
    grpc_key: Path | None = None,
    http_cert: Path | None = None,
    http_key: Path | None = None,
    key_file: Path | None = None,
    old_server_exposed: bool = False,
    allow_origin: Sequence[str] = (),
    allow_host: Sequence[str] = (),
) -> Security:
    """Validate and read the options of `serve`; raises ServerError naming the option."""
    return Security(
        _read_host(host),
        _read_tls("grpc", grpc_cert, grpc_key),
        _read_tls("http", http_cert, http_key),
        old_server_exposed,
        tuple(allow_origin),
        tuple(allow_host),
        keys=read_keys(key_file) if key_file else (),
        key_file=key_file,
    )


def _read_host(host: str) -> str:
    """Return an address in its usual form, which may be given in brackets."""
    matched = BRACKETED.fullmatch(host)
    try:
        address = ipaddress.ip_address(matched[1] if matched else host)
    except ValueError:
        address = None
    if address is None or "%" in host:
        raise ServerError(
            f"--host {host} is not an IP address", "Give one, such as 127.0.0.1, 0.0.0.0, ::1 or ::"
        )
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(address)


def host_name(host: str) -> str:
    """Return a name or address of a Host header, without its port and in one form."""
    name = host.lower()
    matched = BRACKETED_WITH_PORT.fullmatch(name)
    with suppress(ValueError):
        return in_url(str(ipaddress.IPv6Address(matched[1] if matched else name)))
    return re.sub(r":\d*$", "", name)


def _read_tls(door: str, cert: Path | None, key: Path | None) -> Tls | None:
    """Return a certificate that can be used; door: of the options' names."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ServerError(
            "TLS needs a certificate and its key", f"Give both --{door}-cert and --{door}-key"
        )
    tls = Tls(cert.resolve(), key.resolve())
    certificate_name(tls, door)
    return tls


def certificate_name(tls: Tls, door: str = "grpc") -> str:
    """Return a name in the certificate, with which its owner is addressed anywhere.

    Raises ServerError for a certificate that no client would accept. The standard library shows a
    certificate's contents only after a handshake, so one is made in memory.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asking_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking_side.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate need not be a CA's
    asking_side.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        server.load_cert_chain(tls.cert, tls.key, password="")
        asking_side.load_verify_locations(tls.cert)
        asking = asking_side.wrap_bio(to_client, to_server)
        answering = server.wrap_bio(to_server, to_client, server_side=True)
        for end in (asking, answering, asking):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
        certificate = asking.getpeercert() or {}
    except (OSError, ValueError) as error:  # some errors have no file name
        raise ServerError(
            f"--{door}-cert {tls.cert} and --{door}-key {tls.key} cannot be used: {error}",
            "Give PEM files: a valid certificate, and its own key without a password",
        ) from None
    fields: Any = (*certificate.get("subjectAltName", ()), *chain(*certificate.get("subject", ())))
    names = [value for kind, value in fields if kind in ("DNS", "IP Address", "commonName")]
    if not names:
        raise ServerError(
            f"--{door}-cert {tls.cert} names no host", "Give a certificate with a subjectAltName"
        )
    return str(names[0]).replace("*", "any")


def refuse_exposed_old_server(security: Security, binary: Path) -> None:
    if not security.exposed or security.old_server_exposed:
        return
    if (version := server_version(binary)) < OLDEST_EXPOSED:
        known = ".".join(map(str, version)) or "of unknown version"
        raise ServerError(
            f"tritonserver {known} has known security holes and may only listen on loopback",
            "Put a tritonserver of 2.71 or later on PATH, in an environment without "
            "nvidia-pytriton, or accept the risk with --insecure-old-server",
        )


def server_version(binary: Path) -> tuple[int, ...]:
    """Return (major, minor), printed before it ends without a repository; () if unknown."""
    ports = [f"--allow-{kind}=false" for kind in ("http", "grpc", "metrics")]
    command = [str(binary), "--model-repository=/nonexistent", *ports]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    matched = re.search(r"server_version +\| +(\d+)\.(\d+)", done.stdout + done.stderr)
    return (int(matched[1]), int(matched[2])) if matched else ()


def _restrict(apis: tuple[str, ...], header: str, key: str) -> str:
    return f"--grpc-restricted-protocol={','.join(apis)}:{header}={key}"


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line; raises ServerError naming the option."""
    try:
        lines = map(str.strip, path.read_text(encoding="ascii").splitlines())
        keys = tuple(filter(None, lines))
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(
            f"--key-file {path} cannot be read: {error}", "Give a text file with a key a line"
        ) from None
    if not keys or not all(map(KEY_FORM.fullmatch, keys)):
        raise ServerError(
            f"--key-file {path} does not hold keys: 16 to 256 letters, digits, - or _ a line",
            f"Make one: openssl rand -hex 32 > {path}",
        )
    return keys
