"""HTTP to a running server, for commands: its address, its key, no proxy on this machine."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from dflash_trt.errors import RequestError, ServerError

TIMEOUT = 10.0  # seconds, for facts


def client_options(url: str, key_file: Path | None) -> dict[str, Any]:
    """Return what `httpx.Client` takes; RequestError for what is no address, or no key."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(f"--url {url} is no address", "Give it as http://127.0.0.1:8000")
    headers = {}
    if key_file is not None:
        headers["Authorization"] = f"Bearer {first_key(key_file)}"
    return {
        "base_url": url.rstrip("/").removesuffix("/v1"),
        "headers": headers,
        "trust_env": not _is_loopback(parts.hostname),  # of which proxies are a part
    }


def server_facts(url: str, key_file: Path | None) -> Mapping[str, Any]:
    """Return what a server says of its build; ServerError if it does not."""
    try:
        with httpx.Client(**client_options(url, key_file), timeout=TIMEOUT) as client:
            answer = client.get("/v1/build")
    except httpx.HTTPError as error:
        raise ServerError(
            f"{url} does not answer: {error}", "Start the server, or correct --url"
        ) from error
    if answer.status_code == 401:
        raise ServerError(f"{url} wants a key", "Give the file with it: --key-file")
    if answer.status_code == 503:
        raise ServerError(f"{url} is not ready", "Wait until it is")
    try:
        facts = answer.json() if answer.status_code == 200 else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or "digest" not in facts:
        raise ServerError(
            f"{url} says nothing of a build (HTTP {answer.status_code})",
            "Give the HTTP port of a `dflash-trt serve` of this version",
        )
    return facts


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def first_key(file: Path) -> str:
    """Return the first key of a file of `serve --key-file`; RequestError without one."""
    try:
        return file.read_text(encoding="ascii").split()[0]
    except (OSError, ValueError, IndexError) as error:
        raise RequestError(
            f"--key-file {file} holds no key: {error}", "Give the file of serve's --key-file"
        ) from error
