"""Replacement of a served drafter under load: `dflash-trt update-drafter`.

The engine loop replaces it between two rounds. A drafter affects only speed, so it is measured in
place, and the old one restored if it is worse. The command reaches the same user's `serve` through
an abstract Unix socket named after the HTTP port, which disappears with the process.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt.builder import Depth, Manifest
from dflash_trt.builder.manifest import CONFIG
from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.builder.provenance import BOM
from dflash_trt.errors import DflashError, ServerError
from dflash_trt.files import size_of
from dflash_trt.machine import free_memory
from dflash_trt.serving.channel import SocketServer, ask, json_server
from dflash_trt.serving.supervisor.process import Say, Server, find_repository

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


@dataclass(frozen=True)
class Replacement:
    """A drafter that serves now."""

    build: str  # directory
    name: str  # of the build
    digest: str
    tokens_per_round: float
    tokens_per_round_before: float  # of the drafter that it replaced

    def __str__(self) -> str:
        return (
            f"the drafter of {self.build} serves: {self.tokens_per_round:.2f} tokens a round, "
            f"{self.tokens_per_round_before:.2f} before"
        )


@dataclass(frozen=True)
class Refusal:
    problem: str
    fix: str


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
        self._opened: list[OpenedBuild] = []
        self._calls: SocketServer | None = None
        with suppress(OSError):  # another user has the name: serve without updates
            self._calls = json_server(_socket_address(http_port), lambda call: self._answer(*call))

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close(END_TIMEOUT)
        for build in self._opened:
            build.close()

    def _answer(self, build: str, least_acceptance: float) -> dict[str, Any]:
        try:
            replacement = self._replace_or_keep(Path(build), least_acceptance)
        except DflashError as error:
            self._say(f"update: failed, the old drafter serves on: {error}")
            return {"refusal": asdict(Refusal(error.problem, error.fix))}
        self._say(f"update: {replacement}")
        return {"replacement": asdict(replacement)}

    def _replace_or_keep(self, directory: Path, least_acceptance: float) -> Replacement:
        new = OpenedBuild(find_repository(directory).parent, self._check, self._signer)
        try:
            replacement = self._replace(new, least_acceptance)
        except BaseException:
            new.close()
            raise
        self._opened.append(new)
        return replacement

    def _replace(self, new: OpenedBuild, least_acceptance: float) -> Replacement:
        server, old = self._server, self._server.build
        if not differ_in_drafter_alone(old.manifest, new.manifest):
            raise ServerError(
                f"{new.directory} differs from {old.directory} in more than the drafter's weights, "
                "or there is no drafter that can be replaced",
                "Roll it out as a new server: docs/release.md",
            )
        need, free = size_of(new.directory / "engines" / "drafter"), free_memory()
        if need > free:
            raise ServerError(
                f"the drafter of {new.directory} takes about {need / 1e9:.1f} GB of memory, and "
                f"{free / 1e9:.1f} GB are free",
                "Give the machine more, or restart `serve` with the new build",
            )
        before, process = self._tokens_per_round(), server.process
        server.load_drafter(new.directory)
        try:
            new.check_unchanged()
            after = self._tokens_per_round()
            if after < least_acceptance * before:
                raise ServerError(
                    f"the drafter of {new.directory} commits {after:.2f} tokens a round, the "
                    f"running one {before:.2f}",
                    "Serve a better one, or allow the fall with a lower --least-acceptance",
                )
            if server.process is not process:  # the old drafter was restarted
                raise ServerError("the server died meanwhile", "Try it again")
        except DflashError:
            server.load_drafter(old.directory)
            raise
        server.build = new  # used by a restart
        self._tell_drafter(new.manifest["name"], new.digest)
        name, digest = new.manifest["name"], new.digest
        return Replacement(str(new.directory), name, digest, round(after, 2), round(before, 2))

    def _tokens_per_round(self) -> float:
        server, rounds = self._server, 0
        for text in TEXTS:
            deadline = time.monotonic() + TIMEOUT
            while (out := server.triton.generate(text, TOKENS, TIMEOUT)) is None:
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
        unchanged = {name: entry for name, entry in files if not name.startswith(DRAFTER_FILES)}
        return {**unchanged, **dict.fromkeys(FOLLOWING), "name": manifest["name"]}

    has_drafter = any(name.startswith(DRAFTER_FILES) for name in old["files"])
    return has_drafter and rest(old) == rest(new)


def update_drafter(http_port: int, build: Path, least_acceptance: float) -> Replacement:
    """Replace the drafter of the server at this port; ServerError if it keeps its own.

    least_acceptance: sufficient fraction of the running drafter's tokens per round.
    """
    try:
        answer = ask(_socket_address(http_port), [str(build.resolve()), least_acceptance])
    except OSError:
        raise ServerError(
            f"no `dflash-trt serve` of yours has HTTP port {http_port}",
            "Give its port: --http-port",
        ) from None
    except ValueError:
        raise ServerError(
            "`serve` ended before the update", "Start it with the build it is to serve"
        ) from None
    if "refusal" in answer:
        raise ServerError(**answer["refusal"])
    return Replacement(**answer["replacement"])


def _socket_address(http_port: int) -> str:
    return f"\0dflash-trt.{http_port}"
