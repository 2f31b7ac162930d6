"""Reading `manifest.json` of a build, and comparing every file with it."""

import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from dflash_trt.config import Speculation
from dflash_trt.errors import BuildError
from dflash_trt.files import LARGE, Entry, Size, manifest_entry, read_as, read_json

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"  # covers all that a server reads, the manifest included: `signing.py`
# cluster files: in the manifest, but not in images and signatures
DEPLOYS = ("deploy/Dockerfile", "deploy/kubernetes/", "deploy/kserve")
FULL = 16 << 30  # bytes of a build up to which all files are hashed by default

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

    def __str__(self) -> str:
        kinds = (("changed", self.changed), ("missing", self.missing), ("added", self.added))
        all_ = [f"{name} ({kind})" for kind, names in kinds for name in names]
        return ", ".join(all_[:3]) + (f" and {len(all_) - 3} more" if len(all_) > 3 else "")


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
    """Raise BuildError unless unchanged; depth None: full up to `FULL` bytes, else quick."""
    if depth == "none":
        return
    if found := differences(directory, read_manifest(directory), depth, report, digested):
        raise BuildError(
            f"{directory} is not as it was built: {found}",
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
    found = {file_name(directory, file): file for file in files_of(directory)}
    del found[MANIFEST]
    if depth is None:
        size = sum(int(each.get("size", 0)) for each in listed.values())
        depth = "full" if size <= FULL else "quick"
    limit = {"none": 0, "quick": LARGE, "full": float("inf")}[depth]
    both, changed = sorted(found.keys() & listed.keys()), []
    for done, name in enumerate(both):
        report("checking files", done, len(both))
        try:
            if not _unchanged(found[name], listed[name], 0 if name in digested else limit):
                changed.append(name)
        except OSError as error:
            raise BuildError(
                f"cannot read {found[name]}: {error.strerror}", "Make it readable, or build again"
            ) from error
    report("checking files", len(both), len(both))
    # files that only deploy the build may all be missing
    optional = () if any(name.startswith(DEPLOYS) for name in found) else DEPLOYS
    missing = [x for x in listed.keys() - found.keys() if not x.startswith(optional)]
    return Differences(changed, sorted(missing), sorted(found.keys() - listed.keys()))


def _unchanged(file: Path, listed: Entry, hashed_below: float) -> bool:
    if file.is_symlink() or not file.is_file() or file.stat().st_size != listed.get("size"):
        return False
    return file.stat().st_size >= hashed_below or manifest_entry(file) == listed


def files_of(directory: Path) -> list[Path]:
    """Return all files of the build, sorted, without its signature."""
    walked = os.walk(directory)
    found = [Path(at, name) for at, folders, names in walked for name in (*folders, *names)]
    return sorted(
        file
        for file in found
        if (file.is_symlink() or not file.is_dir()) and file != directory / SIGNATURE
    )


def served_files(directory: Path) -> list[Path]:
    files = files_of(directory)
    return [file for file in files if not file_name(directory, file).startswith(DEPLOYS)]


def file_name(directory: Path, file: Path) -> str:
    return file.relative_to(directory).as_posix()
