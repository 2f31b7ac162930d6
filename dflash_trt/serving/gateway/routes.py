"""Triton's HTTP routes, and the key that each asks for."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_trt.serving.security import LOOKS, Security
from dflash_trt.triton import CHANGES, INTERNAL

NAME = "[A-Za-z0-9_.-]+"
MODEL = f"/models/(?P<model>{NAME})(?:/versions/[0-9]+)?"
SHARED_MEMORY = f"/(?:system|cuda)sharedmemory(?:/region/{NAME})?"
ROUTES = (  # methods, path after /v2, API as Triton's restrictions name it
    ("GET", "/health/(?P<action>live|ready)", "health"),
    ("GET", f"{MODEL}/(?P<action>ready)", "health"),
    ("GET", "/?", "metadata"),
    ("GET", f"/models/stats|{MODEL}/stats", "statistics"),
    ("GET", f"{MODEL}/config", "model-config"),
    ("GET POST", f"(?:{MODEL})?/trace/setting", "trace"),
    ("POST", f"{MODEL}/(?P<action>infer|generate|generate_stream)", "inference"),
    ("GET", MODEL, "metadata"),
    ("POST", f"/repository/(?:index|models/{NAME}/(?:load|unload))", "model-repository"),
    ("GET", f"{SHARED_MEMORY}/status", "shared-memory"),
    ("POST", f"{SHARED_MEMORY}/(?:register|unregister)", "shared-memory"),
    ("GET POST", "/logging", "logging"),
)
_compiled = [(methods.split(), re.compile(path), api) for methods, path, api in ROUTES]


@dataclass(frozen=True)
class Route:
    api: str
    model: str | None
    action: str | None  # where it matters


@dataclass
class Refusal(Exception):
    """Triton's answer, with its status."""

    status: int
    message: str


def find(method: str, path: str) -> Route:
    """The route of a path as it was sent; `Refusal` when Triton has none."""
    known = False
    for methods, pattern, api in _compiled:
        if found := pattern.fullmatch(path.removeprefix("/v2")) if path[:3] == "/v2" else None:
            known = True
            if method in methods:
                parts = found.groupdict()
                return Route(api, parts.get("model"), parts.get("action"))
    raise Refusal(405, "Method Not Allowed") if known else Refusal(404, "Not Found")


def check_access(route: Route, headers: Mapping[str, str], security: Security) -> None:
    """`Refusal` without the key that this route asks for, or for an internal model."""
    if route.api == "inference" and route.model in INTERNAL:
        raise Refusal(403, f"The model {route.model} is internal. Ask dflash or dflash_infer.")
    if route.api in CHANGES or (route.api in LOOKS and security.admin_key):
        header, key = "admin-key", security.admin_key or security.own_key
    elif route.api == "inference" and security.inference_key:
        header, key = "inference-key", security.inference_key
    else:
        return
    if not secrets.compare_digest(headers.get(header, "").encode(), key.encode()):
        raise Refusal(403, f"This API is restricted, expecting header '{header}'")
