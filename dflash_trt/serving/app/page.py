"""The chat page: its files, and its route for facts beside OpenAI's API."""

import re
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

Json = dict[str, Any]
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LIE_THERE = [each for each in Path(__file__).with_name("page").iterdir() if each.suffix in TYPES]
FILES = {f"/page/{file.name}": file for file in sorted(_LIE_THERE)}
FILES["/"] = FILES["/page/index.html"]
OPEN = frozenset(FILES)  # no key needed
COST = re.compile(r"^dflash_cost_seconds\{(.*)\} (\S+)$", re.M)
LABEL = re.compile(r'(rows|step|tokens)="(\w*)"')


def router(facts: Json, metrics: Callable[[], Awaitable[str]]) -> APIRouter:
    """Return the page's routes; facts: of the build, for `GET /page/server`."""
    routes = APIRouter()

    @routes.get("/page/server")
    async def server() -> Response:
        return JSONResponse({**facts, "costs": costs(await metrics())})

    async def give(content: bytes, kind: str, _: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    for path, file in FILES.items():
        routes.add_route(path, partial(give, file.read_bytes(), TYPES[file.suffix]))
    return routes


def costs(metrics: str) -> list[Json]:
    """Return the measured step times on this machine; empty if the engine reports none."""
    found = []
    for labels, seconds in COST.findall(metrics):
        said = dict(LABEL.findall(labels))
        found.append(
            {
                "step": said["step"],  # "verify" or "draft"
                "sequences": int(said["rows"]),
                "tokens": int(said.get("tokens") or 0),  # verified per sequence
                "seconds": float(seconds),
            }
        )
    return found
