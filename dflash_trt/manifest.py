"""`manifest.json`: what a build was made from and every file it holds, each with its SHA-256."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt.checkpoints.drafter import Drafter
from dflash_trt.checkpoints.source import Report
from dflash_trt.checkpoints.target import Target
from dflash_trt.checkpoints.tokenizer import tokenizer_files
from dflash_trt.config import BuildConfig
from dflash_trt.errors import BuildError
from dflash_trt.serving.repository import templates

MANIFEST = "manifest.json"

Manifest = dict[str, Any]


def inputs_manifest(
    config: BuildConfig,
    target: Target,
    drafter: Drafter,
    commits: Mapping[str, str | None],
    report: Report,
) -> Manifest:
    """Everything that decides a build's bytes; no path and no time, so that it repeats.

    commits: of each role, the commit where it comes from the Hub.
    """
    inputs = {}
    for role, model in (("target", target), ("drafter", drafter)):
        files = {model.directory / "config.json", *model.weights.files}
        if role == "target":
            files.update(tokenizer_files(model.directory))
        inputs[role] = digests(model.directory, sorted(files), report, f"hashing the {role}")
    manifest = {
        "dflash_trt": {"version": dflash_trt.__version__, "sha256": _own_digest()},
        "name": config.name,
        "config": config.model_dump(mode="json", exclude={"name", "target", "drafter"}),
        "target": asdict(target.spec),
        "drafter": asdict(drafter.spec),
        "inputs": inputs,
        "hub": {
            role: {"id": getattr(config, role).hub, "commit": commit}
            for role, commit in commits.items()
            if commit
        },
    }
    return dict(json.loads(json.dumps(manifest)))  # tuples become lists, as in a file


def write_manifest(directory: Path, inputs: Manifest, report: Report) -> Manifest:
    """Write `manifest.json` over all files below `directory`; it must be the last file."""
    manifest = {**inputs, "files": digests(directory, _files(directory), report, "hashing")}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a built directory; BuildError when `directory` is not one."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not {"dflash_trt", "config", "files"} <= manifest.keys():
        raise BuildError(
            f"{directory} is not a directory that dflash-trt built",
            "Make one with `dflash-trt build CONFIG`",
        )
    return manifest


def matching_manifest(output: Path, inputs: Manifest) -> Manifest | None:
    """The manifest in `output`, if made from `inputs` and every file is there in its size."""
    if not (output / MANIFEST).is_file():
        return None
    manifest = read_manifest(output)
    listed = {name: entry["size"] for name, entry in manifest["files"].items()}
    found = {_name(output, file): file.stat().st_size for file in _files(output)}
    same = {**manifest, "files": None} == {**inputs, "files": None}
    return (
        manifest if same and listed == {n: s for n, s in found.items() if n != MANIFEST} else None
    )


def digests(
    directory: Path, files: Iterable[Path], report: Report, step: str
) -> dict[str, dict[str, str | int]]:
    """SHA-256 and size in bytes of each file, by its path in `directory`."""
    files = list(files)
    found: dict[str, dict[str, str | int]] = {}
    for done, file in enumerate(files):
        report(step, done, len(files))
        entry: dict[str, str | int] = {"sha256": _sha256([file]), "size": file.stat().st_size}
        found[_name(directory, file)] = entry
    report(step, len(files), len(files))
    return found


def _own_digest() -> str:
    """Of the code that builds: a build by older code is not the same build."""
    package = Path(dflash_trt.__file__).parent
    code = [file for file in package.rglob("*.py") if "model_repository" not in file.parts]
    models = [file for file in templates().rglob("*") if file.suffix in (".py", ".pbtxt")]
    return _sha256([*sorted(code), *sorted(models)])


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    """Every file below `directory`, sorted; Triton's Python leaves caches, which are no part."""
    found = [Path(at, name) for at, _, names in os.walk(directory) for name in names]
    return sorted(file for file in found if "__pycache__" not in file.parts)


def _name(directory: Path, file: Path) -> str:
    return file.relative_to(directory).as_posix()
