"""A stand-in for the Hugging Face Hub on 127.0.0.1, for `huggingface_hub`'s own client.

It follows the published Hub API (huggingface.co/docs/hub/api) in the routes that a download takes:

- `GET /api/models/ORG/NAME/revision/REVISION`: the commit of a branch or tag, as `sha`
- `GET /api/models/ORG/NAME/tree/COMMIT?recursive=True`: the files with sizes and object ids
- `HEAD` and `GET /ORG/NAME/resolve/COMMIT/PATH`: a file, with `X-Repo-Commit` and `ETag`; a large
  one is a redirect with `X-Linked-ETag` and `X-Linked-Size` to where it is stored (`/lfs/SHA256`)

Errors carry the published `X-Error-Code`: RepoNotFound, RevisionNotFound, GatedRepo, EntryNotFound.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repository:
    directory: Path
    branches: dict[str, str]  # and tags: name to commit
    gated: bool = False

    def files(self) -> dict[str, Path]:
        found = (file for file in self.directory.rglob("*") if file.is_file())
        return {file.relative_to(self.directory).as_posix(): file for file in found}


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository]
    log: list[str] = field(default_factory=list)  # "METHOD path"
    failing: tuple[str, int] | None = None  # answer what begins with this path with this status


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve a Hub on a free port until the end of the `with`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", {})  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.log.append(f"{self.command} {self.path}")
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if hub.failing and self.path.startswith(hub.failing[0]):
            return self._error(hub.failing[1], "", "the Hub is down")
        if parts[0] == "lfs":
            if "Authorization" in self.headers:  # a token is for the Hub only
                return self._error(400, "", "unexpected credentials")
            return self._large_file(hub, parts[1])
        if parts[:2] == ["api", "models"]:
            parts = parts[2:]
        repository = hub.repositories.get("/".join(parts[:2]))
        if repository is None:  # the Hub says 401, so that private names are not told
            return self._error(401, "RepoNotFound", "Repository not found")
        what, revision, path = parts[2], parts[3], "/".join(parts[4:])
        commit = repository.branches.get(revision, revision)
        if commit not in repository.branches.values():
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if what == "revision":
            names = [{"rfilename": name} for name in sorted(repository.files())]
            return self._json({"id": "/".join(parts[:2]), "sha": commit, "siblings": names})
        if what == "tree":
            return self._json([_listed(*each) for each in sorted(repository.files().items())])
        return self._resolve(repository, commit, path)

    do_HEAD = do_GET

    def _resolve(self, repository: Repository, commit: str, path: str) -> None:
        token = self.headers.get("Authorization")
        if repository.gated and token != f"Bearer {TOKEN}":
            status = 403 if token else 401
            return self._error(status, "GatedRepo", "Access to this model is restricted.")
        file = repository.files().get(path)
        if file is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        listed, data = _listed(path, file), file.read_bytes()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{listed["oid"]}"'}
        if "lfs" not in listed:
            return self._answer(200, data, headers)
        sha256 = hashlib.sha256(data).hexdigest()
        headers |= {"X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
        port = self.server.server_address[1]
        store = f"http://localhost:{port}/lfs/{sha256}"  # another host, as the Hub's is
        return self._answer(302, b"", headers | {"Location": store})

    def _large_file(self, hub: Hub, sha256: str) -> None:
        files = [each for r in hub.repositories.values() for each in r.files().values()]
        contents = (file.read_bytes() for file in files)
        data = next(data for data in contents if hashlib.sha256(data).hexdigest() == sha256)
        self._answer(200, data, {"ETag": f'"{sha256}"'})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer(status, json.dumps({"error": message}).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _listed(path: str, file: Path) -> dict[str, object]:
    """Return a file as the tree route describes it: its git and, if it has one, its LFS object."""
    data = file.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
    if path.endswith((".safetensors", ".bin")):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\n"
        pointer += f"size {len(data)}\n"
        entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": len(pointer)}
        data = pointer.encode()
    return entry | {"oid": hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()}
