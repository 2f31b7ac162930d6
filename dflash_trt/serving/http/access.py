"""Who may ask: refusals before a request's body is read."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response

from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.page import OPEN
from dflash_trt.serving.http.state import State
from dflash_trt.serving.security import KEY_HEADER, OWN_KEY_HEADER, host_name

SERVER_FULL = "The server is full. Try again later."
KEY_MISSING = "The API key is missing or wrong."
COMPRESSED = "A compressed body is not taken: send it without Content-Encoding."
NOT_JSON = "Send the body as JSON, with the header Content-Type: application/json."
JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json")
HEADERS = {  # of refusals, as RFC 9110 has them
    401: {"WWW-Authenticate": "Bearer"},
    415: {"Accept": "application/json", "Accept-Encoding": "identity"},
    503: {"Retry-After": "1"},
}
HEALTH = ("/health", "/v2/health/ready")
MODEL_READY = re.compile(r"/v2/models/[^/]+(/versions/[0-9]+)?/ready")
OPEN_PATHS = {*OPEN, *HEALTH, "/v2/health/live", "/metrics"}
READING = ("GET", "HEAD", "OPTIONS")  # methods of requests that change nothing
Problem = tuple[int, str]  # status and message


@dataclass(frozen=True)
class Access:
    """Who may ask: keys, and without a key the names and pages that a browser may come from.

    On loopback without a key any web page that a browser of this machine shows could ask.
    """

    own_key: str  # that `serve` sends
    hosts: frozenset[str] | None  # names by which clients may call this machine; None: any
    origins: frozenset[str]  # of other web pages that may ask; "*": all

    def refusal_before_body(self, request: HTTPConnection, state: State) -> Response | None:
        """Return the answer to a request that is refused whatever its body holds."""
        path, method = request.scope["path"], request.scope["method"]
        is_own = self.is_own(request)
        request.state.is_own = is_own
        problem = self._refusal(request)
        if problem is not None:
            return refuse(path, *problem)
        reason = _reason_to_refuse(state, is_own)
        ready = state.is_ready or (is_own and not state.draining)
        if not ready and (path in HEALTH or MODEL_READY.fullmatch(path)):
            return Response(status_code=503 if path == "/health" else 400)  # as Triton does
        if state.connections.full and not is_own and path not in HEALTH:
            return refuse(path, 503, SERVER_FULL)
        if is_open(path, method):
            return None
        if not self._has_key(request, state.serve.keys):
            return refuse(path, 401, KEY_MISSING)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            return refuse(path, 415, f"{COMPRESSED} It is said to be {encoding[:40]!r}.")
        if method == "POST" and path.startswith("/v1") and not _is_json(request):
            kind = request.headers.get("content-type", "")
            return refuse(path, 415, f"{NOT_JSON} It is {kind[:80]!r}." if kind else NOT_JSON)
        return refuse(path, 503, reason) if reason else None

    def _refusal(self, request: HTTPConnection) -> Problem | None:
        """Return why a request is refused; the key is asked for elsewhere."""
        if self.hosts is None or self.is_own(request):
            return None
        host = request.headers.get("host", "")
        name = host_name(host)
        if name and name not in self.hosts:
            return 403, (
                f"This server is not called {name[:80]!r}: ask for 127.0.0.1 or localhost, or start"
                " it with --allow-host or a key."
            )
        origin = request.headers.get("origin")
        changes = request.scope["method"] not in READING
        if origin is None or not changes or {origin, "*"} & self.origins:
            return None
        if origin.partition("://")[2].lower() == host.lower():
            return None
        return 403, (
            f"Pages of {origin[:80]!r} may not ask this server: start it with --allow-origin or a "
            "key."
        )

    def _has_key(self, request: HTTPConnection, keys: Sequence[str]) -> bool:
        if not keys or self.is_own(request):
            return True
        shown = shown_key(request).encode()
        return any(secrets.compare_digest(shown, key.encode()) for key in keys)

    def is_own(self, request: HTTPConnection) -> bool:
        """Return whether `serve` itself asks."""
        shown = request.headers.get(OWN_KEY_HEADER, "")
        return secrets.compare_digest(shown.encode(), self.own_key.encode())


def shown_key(request: HTTPConnection) -> str:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        shown = request.headers.get(KEY_HEADER, "")
    return shown.strip()


def is_open(path: str, method: str) -> bool:
    """Return whether no key is asked for."""
    return path in OPEN_PATHS or (method == "GET" and path.startswith("/v2"))


def _is_json(request: HTTPConnection) -> bool:
    """Return whether the body is JSON, or there is none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind:
        return JSON_TYPE.fullmatch(kind) is not None
    length = request.headers.get("content-length", "0")
    return length == "0" and "transfer-encoding" not in request.headers


def _reason_to_refuse(state: State, is_own: bool) -> str:
    """Return why no request is taken now; `serve` asks a server that is not ready."""
    if is_own and not state.draining:
        return ""
    return state.reason_to_refuse


def error_body(path: str, status: int, message: str) -> dict[str, object]:
    return {"error": message} if path.startswith("/v2") else Failure(status, message).body()


def refuse(path: str, status: int, message: str) -> Response:
    return JSONResponse(error_body(path, status, message), status, HEADERS.get(status))
