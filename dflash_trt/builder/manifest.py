"""Reading `manifest.json` of a build, and comparing every file with it.

The SHA-256 of `manifest.json` names the build. Files of `deploy/` hold that digest, so the manifest
counts them with zeros in its place.
"""

import hashlib
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from dflash_trt.config import Speculation
from dflash_trt.errors import BuildError
from dflash_trt.files import (
    LARGE,
    Entry,
    Size,
    manifest_entry,
    read_as,
    read_bytes,
    read_json,
)

MANIFEST = "manifest.json"
CONFIG = "config.yaml"  # as it was written
SIGNATURE = "model.sig"  # covers all that a server reads, the manifest included: `signing.py`
MEASURED = "measured.json"  # what `bench engine --record` measured
UNCOVERED = (SIGNATURE, MEASURED)  # may come and go: in no manifest
DEPLOY = "deploy/"
SHORT = 12  # hex digits of a digest in names
NO_DIGEST = "0" * 64  # stands for the digest in files of `deploy/` until it is known
# cluster files: in the manifest, but not in images and signatures
DEPLOYS = ("deploy/Dockerfile", "deploy/kubernetes/", "deploy/kserve")
MAX_HASHED = 16 << 30  # bytes of a build up to which all files are hashed by default

Manifest = dict[str, Any]
Depth = Literal["none", "quick", "full"]
"""none: nothing is checked; quick: every size, and digests of files below 256 MiB; full: all."""


class _File(BaseModel):
    model_config = ConfigDict(strict=True)

    size: Annotated[int, Field(ge=0)] = 0


def _nested(*names: str) -> Any:
    return Field(validation_alias=AliasPath(*names))


class _Manifest(BaseModel):
    """Manifest fields that are read; other versions may write more."""

    model_config = ConfigDict(strict=True)

    dflash_trt: dict[str, str]
    name: str
    engine_kind: Annotated[str, _nested("config", "engine", "kind")]
    serving: Annotated[dict[str, Any], _nested("config", "serving")]
    max_seq_len: Annotated[Size | None, _nested("config", "serving", "max_seq_len")] = None
    speculation: Annotated[dict[str, Any], _nested("config", "speculation")]
    vocab_size: Annotated[Size, _nested("target", "vocab_size")]
    block_size: Annotated[Size | None, _nested("drafter", "block_size")] = None  # only with DFlash
    hub: dict[str, dict[str, str]] = {}
    files: dict[str, _File]


@dataclass(frozen=True)
class Differences:
    """Files, by path in the build, that differ from its manifest; sorted."""

    changed: list[str]
    missing: list[str]
    added: list[str]

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.added)

    def among(self, names: Container[str]) -> "Differences":
        return Differences(
            changed=[name for name in self.changed if name in names],
            missing=[name for name in self.missing if name in names],
            added=[name for name in self.added if name in names],
        )

    def __str__(self) -> str:
        names = [f"{name} (changed)" for name in self.changed]
        names += [f"{name} (missing)" for name in self.missing]
        names += [f"{name} (added)" for name in self.added]
        first = ", ".join(names[:3])
        return f"{first} and {len(names) - 3} more" if len(names) > 3 else first


def read_manifest(directory: Path) -> Manifest:
    """Return a built directory's manifest; BuildError if `directory` is none."""
    file = directory / MANIFEST
    try:
        manifest = read_json(file)
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not {"dflash_trt", "config", "files"} <= manifest.keys():
        raise BuildError(
            f"{directory} is not a directory that dflash-trt built",
            "Make one with `dflash-trt build CONFIG`",
        )
    try:
        read_as(file, _Manifest)
    except ValueError as error:
        raise BuildError(
            f"{file} is damaged ({error})", "Remove the directory and run `dflash-trt build` again"
        ) from error
    return manifest


def build_digest(directory: Path) -> str:
    """Return the SHA-256 of `manifest.json` as it was written; BuildError without one."""
    try:
        return hashlib.sha256(read_bytes(directory / MANIFEST)).hexdigest()
    except OSError as error:
        raise BuildError(
            f"{directory} is not a directory that dflash-trt built",
            "Make one with `dflash-trt build CONFIG`",
        ) from error


def write_digest(directory: Path, digest: str) -> None:
    """Put the digest into the files of `deploy/`, where zeros stand for it."""
    for file in (directory / DEPLOY).rglob("*"):
        if file.is_file():
            text = file.read_text(encoding="utf-8").replace(NO_DIGEST, digest)
            text = text.replace(NO_DIGEST[:SHORT], digest[:SHORT])
            file.write_text(text, encoding="utf-8")


def _entry_without_digest(file: Path, digest: str) -> Entry:
    """Return the entry of a file of `deploy/`, as it was before `write_digest`."""
    text = read_bytes(file).replace(digest.encode(), NO_DIGEST.encode())
    text = text.replace(digest[:SHORT].encode(), NO_DIGEST[:SHORT].encode())
    return {"sha256": hashlib.sha256(text).hexdigest(), "size": len(text)}


def speculation_of(manifest: Manifest) -> Speculation:
    """Return a build's speculation; BuildError if another version wrote an unknown value."""
    try:
        return Speculation.model_validate(manifest["config"]["speculation"])
    except ValidationError as error:
        raise BuildError(
            f"the build {manifest['name']} says what this version of dflash-trt does not know "
            f"(config.speculation: {error.errors()[0]['msg']})",
            "Run `dflash-trt build` again",
        ) from error


def check_build(
    directory: Path,
    depth: Depth | None = None,
    report: Callable[[str, int, int], None] = lambda *_: None,
    digested: Container[str] = (),  # already verified
) -> None:
    """Raise BuildError unless unchanged; depth None: full up to `MAX_HASHED` bytes, else quick."""
    if depth == "none":
        return
    differing = differences(directory, read_manifest(directory), depth, report, digested)
    if differing:
        raise BuildError(
            f"{directory} is not as it was built: {differing}",
            "Copy it here again, or remove it and run `dflash-trt build` again",
        )


def differences(
    directory: Path,
    manifest: Manifest,
    depth: Depth | None = None,
    report: Callable[[str, int, int], None] = lambda *_: None,
    digested: Container[str] = (),
) -> Differences:
    """Return the differences, see `check_build`; BuildError for an unreadable file."""
    listed: dict[str, Entry] = manifest["files"]
    files = {file_name(directory, file): file for file in files_of(directory)}
    del files[MANIFEST]
    if depth is None:
        size = sum(int(entry.get("size", 0)) for entry in listed.values())
        depth = "full" if size <= MAX_HASHED else "quick"
    limit = {"none": 0, "quick": LARGE, "full": float("inf")}[depth]
    digest = build_digest(directory)
    both = sorted(files.keys() & listed.keys())
    changed = []
    for done, name in enumerate(both):
        report("checking files", done, len(both))
        try:
            hashed_below = 0 if name in digested else limit
            of_deploy = digest if name.startswith(DEPLOY) else None
            if not _unchanged(files[name], listed[name], hashed_below, of_deploy):
                changed.append(name)
        except OSError as error:
            raise BuildError(
                f"cannot read {files[name]}: {error.strerror}", "Make it readable, or build again"
            ) from error
    report("checking files", len(both), len(both))
    missing = sorted(listed.keys() - files.keys())
    if not any(name.startswith(DEPLOYS) for name in files):
        # files that only deploy the build may all be missing
        missing = [name for name in missing if not name.startswith(DEPLOYS)]
    return Differences(changed, missing, sorted(files.keys() - listed.keys()))


def _unchanged(file: Path, listed: Entry, hashed_below: float, digest: str | None) -> bool:
    """Compare a file; digest: the build's, for a file that may hold it."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size != listed.get("size"):
        return False
    if file.stat().st_size >= hashed_below:
        return True
    if digest is not None:
        return _entry_without_digest(file, digest) == listed
    return manifest_entry(file) == listed


def files_of(directory: Path) -> list[Path]:
    """Return all files of the build that its manifest covers, and the manifest; sorted."""
    uncovered = {directory / name for name in UNCOVERED}
    files = []
    for folder, folders, names in os.walk(directory):
        for name in (*folders, *names):
            file = Path(folder, name)
            if (file.is_symlink() or not file.is_dir()) and file not in uncovered:
                files.append(file)
    return sorted(files)


def served_files(directory: Path) -> list[Path]:
    files = files_of(directory)
    return [file for file in files if not file_name(directory, file).startswith(DEPLOYS)]


def file_name(directory: Path, file: Path) -> str:
    return file.relative_to(directory).as_posix()
