"""Asks a running server over HTTP: is it ready, does it answer, does it make rounds."""

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException

from dflash_trt.serving.launch import Ports
from dflash_trt.serving.metrics import GENERATION_TOKENS, PROMPT_TOKENS
from dflash_trt.serving.security import Security, reach

# one token, over the whole way that a request takes
PROBE = {
    "inputs": [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [1]},
    ]
}
TIMEOUT = 2.0  # seconds, for what needs no model
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy


@dataclass(frozen=True)
class Health:
    """Where to ask; no method raises for a server that does not answer."""

    url: str
    metrics_url: str
    headers: dict[str, str] = field(repr=False)  # they hold a key

    def is_ready(self) -> bool:
        """What the server says; it goes on saying it when model processes die."""
        return _ask(f"{self.url}/v2/health/ready", TIMEOUT)[0] == 200

    def probe(self, timeout: float) -> int | None:
        """The HTTP status of a request for one token; None without an answer in `timeout` s."""
        return self.post("models/dflash_infer/infer", PROBE, timeout)

    def metrics(self) -> str:
        """The metrics page; empty when the server does not answer."""
        return _ask(self.metrics_url, TIMEOUT)[1]

    def progress(self) -> float | None:
        """Grows with every token; None when the server does not say."""
        page = self.metrics()
        names = f"{GENERATION_TOKENS}|{PROMPT_TOKENS}"
        found = re.findall(rf"^(?:{names})(?:{{.*}})? (\S+)$", page, re.M)
        return sum(map(float, found)) if found else None

    def post(self, path: str, body: object, timeout: float) -> int | None:
        """The HTTP status; None without an answer in `timeout` seconds."""
        data = json.dumps(body).encode()
        return _ask(urllib.request.Request(f"{self.url}/v2/{path}", data, self.headers), timeout)[0]


def health_of(ports: Ports, security: Security) -> Health:
    """Of the server that listens, or will, on these ports."""
    return Health(
        f"http://{reach(security.http_host)}:{ports.http}",
        f"http://{reach(security.host)}:{ports.metrics}/metrics",
        security.headers,
    )


def _ask(request: urllib.request.Request | str, timeout: float) -> tuple[int | None, str]:
    try:
        with _opener.open(request, timeout=timeout) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, HTTPException):
        return None, ""
