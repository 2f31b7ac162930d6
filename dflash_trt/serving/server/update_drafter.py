"""Replacement of a served drafter under load: `dflash-trt update-drafter`.

Triton loads the new `draft` beside the old one, which then ends. A drafter affects only speed, so
it is measured in place, and the old one restored if it is worse. The command reaches the same
user's `serve` through an abstract Unix socket named after the HTTP port, which disappears with the
process.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dflash_trt.build import Depth, Manifest, read_manifest
from dflash_trt.build.manifest import CONFIG, build_digest
from dflash_trt.build.provenance import BOM
from dflash_trt.build.signing import check_signed
from dflash_trt.errors import DflashError, ServerError
from dflash_trt.files import size_of
from dflash_trt.machine import free_memory
from dflash_trt.serving.front.control import SocketServer, ask, json_server
from dflash_trt.serving.server.process import DRAFTER, Say, Server, find_repository

# several kinds of text, because drafters differ by kind
TEXTS = (
    "def main():\n    ",
    "import os\nimport sys\n\n",
    "Once upon a time there was ",
    "The capital of France is",
    '{"name": "',
    "1, 2, 3, 4, 5, 6, ",
)
TOKENS = 32  # per text
TIMEOUT = 120.0  # seconds per text
PAUSE = 0.2  # seconds between attempts if the server does not answer
END_TIMEOUT = 5.0  # seconds to wait for a running update when `serve` stops
DRAFTER_FILES = "engines/drafter/model."
FOLLOWING = (BOM, CONFIG)  # files that name the drafter


class Updates:
    def __init__(
        self,
        server: Server,
        http_port: int,
        say: Say,
        check: Depth | None,
        signer: Path | None,
        tell_drafter: Callable[[str, str], None] = lambda name, digest: None,  # of its build
    ) -> None:
        self._tell_drafter = tell_drafter
        self._server, self._say, self._check, self._signer = server, say, check, signer
        self._manifest = read_manifest(server.repository.parent)
        self._calls: SocketServer | None = None
        with suppress(OSError):  # another user has the name: serve without updates
            self._calls = json_server(_socket_address(http_port), lambda call: self._answer(*call))

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close(END_TIMEOUT)

    def _answer(self, build: str, least: float) -> list[str]:
        """Return the outcome, or a problem and its fix."""
        try:
            outcome = self._replace_or_keep(Path(build), least)
        except DflashError as error:
            self._say(f"update: failed, the old drafter serves on: {error}")
            return [error.problem, error.fix]
        self._say(f"update: {outcome}")
        return [outcome]

    def _replace_or_keep(self, build: Path, least: float) -> str:
        server, old = self._server, self._server.repository.parent
        build = find_repository(build).parent
        check_signed(build, self._check, self._signer)
        manifest = read_manifest(build)
        if not differ_in_drafter_alone(self._manifest, manifest):
            raise ServerError(
                f"{build} differs from {old} in more than the drafter's weights, or runs in one "
                "process",
                "Roll it out as a new server: docs/release.md",
            )
        need, free = size_of(build / "engines" / "drafter"), free_memory()
        if need > free:
            raise ServerError(
                f"the drafter takes about {need / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB "
                "are free",
                "Give the machine more, or restart `serve` with the new build",
            )
        before, process = self._tokens_per_round(), server.process
        with server.reloading(DRAFTER):
            server.load_drafter(build)
            try:
                after = self._tokens_per_round()
                if after < least * before:
                    raise ServerError(
                        f"it commits {after:.2f} tokens a round, the running drafter {before:.2f}",
                        "Serve a better one, or allow the fall with a lower --least-acceptance",
                    )
                if server.process is not process:  # the old drafter was restarted
                    raise ServerError("the server died meanwhile", "Try it again")
            except ServerError:
                server.load_drafter(old)
                raise
        self._manifest = manifest
        server.repository = build / "model_repository"  # used by a restart
        self._tell_drafter(manifest["name"], build_digest(build))
        return f"the drafter of {build} serves: {after:.2f} tokens a round, {before:.2f} before"

    def _tokens_per_round(self) -> float:
        server, rounds = self._server, 0
        for text in TEXTS:
            deadline = time.monotonic() + TIMEOUT
            while (out := server.health.generate(text, TOKENS, TIMEOUT)) is None:
                if time.monotonic() > deadline or server.ended() is not None:
                    raise ServerError(
                        "the server does not generate", f"Read the log: {server.log.path}"
                    )
                time.sleep(PAUSE)
            rounds += out["rounds"][0]
        return len(TEXTS) * (TOKENS - 1) / rounds  # the first token comes from prefill


def differ_in_drafter_alone(old: Manifest, new: Manifest) -> bool:
    def rest(manifest: Manifest) -> Manifest:
        files = manifest["files"].items()
        kept = {name: entry for name, entry in files if not name.startswith(DRAFTER_FILES)}
        return {**kept, **dict.fromkeys(FOLLOWING), "name": manifest["name"]}

    return old["config"]["serving"].get("mode") == "ensemble" and rest(old) == rest(new)


def update_drafter(http_port: int, build: Path, least: float) -> str:
    """least: sufficient fraction of the running drafter's tokens per round. Raises ServerError."""
    try:
        outcome, *fix = ask(_socket_address(http_port), [str(build.resolve()), least])
    except OSError:
        raise ServerError(
            f"no `dflash-trt serve` of yours has HTTP port {http_port}",
            "Give its port: --http-port",
        ) from None
    except ValueError:
        raise ServerError(
            "`serve` ended before the update", "Start it with the build it is to serve"
        ) from None
    if fix:
        raise ServerError(outcome, *fix)
    return str(outcome)


def _socket_address(http_port: int) -> str:
    return f"\0dflash-trt.{http_port}"
