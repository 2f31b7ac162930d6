"""The chat page: its files, and its route for facts beside OpenAI's API."""

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
_PAGE_FILES = [path for path in Path(__file__).with_name("page").iterdir() if path.suffix in TYPES]
FILES = {f"/page/{file.name}": file for file in sorted(_PAGE_FILES)}
FILES["/"] = FILES["/page/index.html"]
OPEN = frozenset(FILES)  # no key needed


def router(facts: Json, root_path: str) -> APIRouter:
    routes = APIRouter()

    @routes.get("/page/server")
    async def server() -> Response:
        return JSONResponse(facts)

    async def give(content: bytes, kind: str, _: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    for path, file in FILES.items():
        content = file.read_bytes()
        if file.suffix == ".html":
            content = content.replace(b'"/page/', f'"{root_path}/page/'.encode())
        routes.add_route(path, partial(give, content, TYPES[file.suffix]))
    return routes
