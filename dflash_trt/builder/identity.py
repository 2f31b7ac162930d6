"""What a build is, for `info`, and how two builds differ, for `diff`."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import JsonValue

from dflash_trt.builder.manifest import (
    CONFIG,
    DEPLOY,
    MEASURED,
    SHORT,
    Manifest,
    build_digest,
    read_manifest,
)
from dflash_trt.builder.program import program
from dflash_trt.builder.provenance import BOM
from dflash_trt.builder.signing import read_signature
from dflash_trt.errors import BuildError
from dflash_trt.files import EXACT, read_as, replace_text

Json = dict[str, Any]
ROLES = ("target", "drafter")
MAX_LINES = 4  # of `diff`, about fields of the config, and about files


@dataclass(frozen=True)
class Record:
    """What `bench engine --record` keeps beside a build."""

    __pydantic_config__: ClassVar = EXACT

    build: str  # digest of the measured build
    measured: str  # when, ISO 8601
    program: str
    machine: str
    # tokens that a round commits, by task and method
    acceptance: dict[str, dict[str, float]]


def write_record(directory: Path, record: Record) -> None:
    replace_text(directory / MEASURED, json.dumps(vars(record), indent=1) + "\n")


def read_record(directory: Path) -> Record | None:
    """Return what was measured of this very build; BuildError for a damaged file."""
    file = directory / MEASURED
    if not file.exists():
        return None
    try:
        record = read_as(file, Record)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{file} is damaged ({error})", "Remove it, or run `dflash-trt bench engine --record`"
        ) from error
    return record if record.build == build_digest(directory) else None


def about_build(directory: Path) -> Json:
    """Return what a build is, for JSON; BuildError if it is none.

    A damaged signature or record is `{"problem": ...}`, which stops nobody from serving.
    """
    manifest = read_manifest(directory)
    files = manifest["files"]
    return {
        "name": manifest["name"],
        "digest": build_digest(directory),
        "engine_kind": manifest["config"]["engine"]["kind"],
        "checkpoints": {role: checkpoint(manifest, role) for role in ROLES if role in manifest},
        "config": manifest["config"],
        "config_file": CONFIG if CONFIG in files else None,
        "program": manifest["dflash_trt"],
        "made_by_this_program": made_here(manifest),
        "files": len(files),
        "bytes": sum(entry["size"] for entry in files.values()),
        "signature": _signature(directory),
        "acceptance": _acceptance(directory),
    }


def _signature(directory: Path) -> Json | None:
    try:
        signature = read_signature(directory)
    except BuildError as error:
        return {"problem": error.problem}
    if signature is None:
        return None
    return vars(signature) | {"of_this_build": signature.of == build_digest(directory)}


def _acceptance(directory: Path) -> Json | None:
    try:
        record = read_record(directory)
    except BuildError as error:
        return {"problem": error.problem}
    return None if record is None else dict(vars(record))


def made_here(manifest: Manifest) -> bool:
    """Return whether this program's code made the build."""
    return bool(manifest["dflash_trt"].get("sha256") == program().sha256)


def checkpoint(manifest: Manifest, role: str) -> Json:
    """Return where a checkpoint comes from, and a digest of the files that were read."""
    inputs = manifest.get("inputs", {}).get(role, {})
    origin = manifest.get("packages", {}).get(role) or manifest.get("hub", {}).get(role) or {}
    text = json.dumps(inputs, sort_keys=True)
    size = sum(entry["size"] for entry in inputs.values())
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {**origin, "files": len(inputs), "bytes": size, "sha256": digest}


def checkpoint_name(source: Mapping[str, Any]) -> str:
    """Return a checkpoint of `about_build` as words."""
    if "commit" in source:
        return f"{source['id']} at {source['commit']}"
    if "version" in source:
        return f"{source['file']} of the package {source['name']} {source['version']}"
    noun = "file" if source["files"] == 1 else "files"
    return f"{source['files']} {noun} of a directory, sha256 {source['sha256'][:SHORT]}"


def difference(old: Path, new: Path) -> list[str]:
    """Return in a few lines how two builds differ; none: they are the same."""
    before = read_manifest(old)
    after = read_manifest(new)
    digest_before = build_digest(old)
    digest_after = build_digest(new)
    if digest_before == digest_after:
        return []
    lines = list(_changes("name", before["name"], after["name"]))
    for role in ROLES:
        lines += _changes(role, _source(before, role), _source(after, role))
    lines += _field_changes(before["config"], after["config"])
    lines += _changes("program", _made_by(before), _made_by(after))
    lines += _file_changes(before["files"], after["files"])
    lines += _changes("size", _size(before), _size(after))
    return [f"digest: {digest_before[:SHORT]} -> {digest_after[:SHORT]}", *lines]


def _changes(what: str, old: str, new: str) -> Iterator[str]:
    if old != new:
        yield f"{what}: {old} -> {new}"


def _size(manifest: Manifest) -> str:
    size = sum(entry["size"] for entry in manifest["files"].values())
    return f"{size / 1e6:.1f} MB"


def _source(manifest: Manifest, role: str) -> str:
    if role not in manifest:
        return "none"
    source = checkpoint(manifest, role)
    return f"{checkpoint_name(source)} ({source['sha256'][:SHORT]})"


def _made_by(manifest: Manifest) -> str:
    made_by = manifest["dflash_trt"]
    return f"{made_by['version']}, code {made_by.get('sha256', '')[:SHORT]}"


def _field_changes(old: JsonValue, new: JsonValue) -> list[str]:
    before = dict(_fields(old))
    after = dict(_fields(new))
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        lines += _changes(name, before.get(name, "absent"), after.get(name, "absent"))
    return _cut(lines, "fields of the config")


def _fields(value: JsonValue, path: str = "config") -> Iterator[tuple[str, str]]:
    """Yield each field's path and value."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _fields(inner, f"{path}.{name}")
    else:
        yield path, json.dumps(value)


def _file_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return changed files but for `deploy/` and the bill, which follow from the rest."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name.startswith((DEPLOY, BOM)) or old.get(name) == new.get(name):
            continue
        change = "changed"
        if name not in new:
            change = "gone"
        elif name not in old:
            change = "new"
        lines.append(f"{name}: {change}")
    return _cut(lines, "files")


def _cut(lines: list[str], what: str) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    rest = len(lines) - MAX_LINES + 1
    return [*lines[: MAX_LINES - 1], f"and {rest} more {what}"]
