"""The page for a browser: its files, and what it asks of the server beside OpenAI's API."""

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
POLICY = "Content-Security-Policy"
HEADERS = {
    POLICY: (
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
OPEN = frozenset(FILES)  # nobody needs a key for these
COST = re.compile(r"^dflash_cost_seconds\{(.*)\} (\S+)$", re.M)
LABEL = re.compile(r'(rows|step|tokens)="(\w*)"')


def router(facts: Json, exposition: Callable[[], Awaitable[str]]) -> APIRouter:
    """facts: of the build, as `GET /page/server` has them; exposition: the server's metrics."""
    routes = APIRouter()

    @routes.get("/page/metrics")
    async def metrics() -> Response:
        return Response(await exposition(), media_type="text/plain; version=0.0.4")

    @routes.get("/page/server")
    async def server() -> Response:
        return JSONResponse({**facts, "costs": costs(await exposition())})

    async def give(content: bytes, kind: str, _: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    for path, file in FILES.items():
        routes.add_route(path, partial(give, file.read_bytes(), TYPES[file.suffix]))
    return routes


def costs(metrics: str) -> list[Json]:
    """What steps take on this machine, as measured; none where the engine does not tell."""
    found = []
    for labels, seconds in COST.findall(metrics):
        said = dict(LABEL.findall(labels))
        found.append(
            {
                "step": said["step"],  # "verify" or "draft"
                "sequences": int(said["rows"]),
                "tokens": int(said.get("tokens") or 0),  # that are verified of each
                "seconds": float(seconds),
            }
        )
    return found
