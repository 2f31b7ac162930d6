"""This program: its version, a digest of its code, and its commit."""

import json
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import dflash_trt
from dflash_trt.builder.repository import TEMPLATES
from dflash_trt.files import sha256_of_concatenated

GIT_TIMEOUT = 10.0  # seconds
NOT_CODE = {"model_repository", "__pycache__"}  # folders: templates are counted by themselves


@dataclass(frozen=True)
class Program:
    version: str
    sha256: str  # other code may build other bytes
    commit: str | None  # the last that changed it; None: unknown, or changed since

    def as_manifest(self) -> dict[str, str]:
        known = {"version": self.version, "sha256": self.sha256}
        return known if self.commit is None else known | {"commit": self.commit}

    def __str__(self) -> str:
        return describe(self.as_manifest())


def describe(made_by: dict[str, str]) -> str:
    """Return a manifest's `dflash_trt` as words."""
    words = f"dflash-trt {made_by['version']}, code {made_by.get('sha256', '')[:12]}"
    commit = made_by.get("commit")
    return f"{words}, commit {commit[:12]}" if commit else words


@cache
def program() -> Program:
    package = Path(dflash_trt.__file__).parent
    files = [file for file in package.rglob("*") if file.is_file()]
    code = [file for file in files if NOT_CODE.isdisjoint(file.parts)]
    models = [file for file in TEMPLATES.rglob("*") if file.suffix in (".py", ".pbtxt")]
    digest = sha256_of_concatenated([*sorted(code), *sorted(models)])
    return Program(dflash_trt.__version__, digest, _commit(package))


def _commit(package: Path) -> str | None:
    """Return the commit of a checkout, or the one that pip installed from."""
    if (package.parent / ".git").exists():
        return _commit_of_checkout(package)
    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError):
        origin = distribution("dflash-trt").read_text("direct_url.json")  # PEP 610
        return str(json.loads(origin or "")["vcs_info"]["commit_id"])
    return None


def _commit_of_checkout(package: Path) -> str | None:
    code = [package.name, "model_repository"]
    changed = _git(package.parent, "status", "--porcelain", "--", *code)
    commit = _git(package.parent, "log", "-1", "--format=%H", "--", *code)
    return commit if commit and changed == "" else None


def _git(directory: Path, *words: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", *words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT,
            check=True,
        )
        return done.stdout.strip()
    return None
