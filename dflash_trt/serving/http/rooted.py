"""A server behind an ingress that gives it one path of a host: `serve --root-path`."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.errors import ServerError

ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


def read_root_path(text: str) -> str:
    """Return the path without a slash at its end; ServerError if it is none."""
    root = text.rstrip("/")
    if root and not ROOT_PATH.fullmatch(root):
        raise ServerError(
            f"--root-path {text} is no path",
            "Give one such as /llm: letters, digits, - . _ ~ and /",
        )
    return root


@dataclass(frozen=True)
class Rooted:
    """Takes requests with the path and, of an ingress that strips it, without.

    Redirects name a path alone, because only the ingress knows its host and whether it has TLS.
    """

    app: ASGIApp
    root: str  # "" if there is none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_here(message: Message) -> None:
            await send(self._with_root(message))

        await self.app(self._without_root(scope), receive, send_here)

    def _without_root(self, scope: Scope) -> Scope:
        raw = scope["raw_path"]
        root = self.root.encode()
        if not root or not (raw == root or raw.startswith(root + b"/")):
            return scope
        path = scope["path"].removeprefix(self.root) or "/"
        return {**scope, "path": path, "raw_path": raw.removeprefix(root) or b"/"}

    def _with_root(self, message: Message) -> Message:
        if message["type"] != "http.response.start" or not 300 <= message["status"] < 400:
            return message
        headers = [
            (name, self._location(value) if name == b"location" else value)
            for name, value in message["headers"]
        ]
        return {**message, "headers": headers}

    def _location(self, url: bytes) -> bytes:
        parts = urlsplit(url)
        query = b"?" + parts.query if parts.query else b""
        return self.root.encode() + parts.path + query
