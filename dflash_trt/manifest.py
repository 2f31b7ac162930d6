"""`manifest.json`: what a build was made from and every file it holds, each with its digest."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt.checkpoints.source import Report
from dflash_trt.digests import Entry, entry, sha256
from dflash_trt.engines.info import COSTS_FILE, stamp
from dflash_trt.errors import BuildError
from dflash_trt.jobs.job import Job
from dflash_trt.serving.repository import templates

MANIFEST = "manifest.json"

Manifest = dict[str, Any]


def inputs_manifest(job: Job, report: Report) -> Manifest:
    """Everything that decides a build's bytes; no path and no time, so that it repeats."""
    config, models = job.config, {"target": job.target, "drafter": job.drafter}
    inputs = {
        role: digests(model.at.directory, sorted(set(model.files)), report, f"hashing the {role}")
        for role, model in models.items()
    }
    manifest = {
        "dflash_trt": {"version": dflash_trt.__version__, "sha256": _own_digest()},
        "name": config.name,
        "config": config.model_dump(mode="json", exclude={"name", "target", "drafter"}),
        **{role: model.known for role, model in models.items()},
        "inputs": inputs,
        "hub": {
            role: {"id": getattr(config, role).hub, "commit": model.at.commit}
            for role, model in models.items()
            if model.at.commit
        },
    }
    return dict(json.loads(json.dumps(manifest)))  # tuples become lists, as in a file


def write_manifest(
    directory: Path, inputs: Manifest, known: Mapping[Path, Entry], report: Report
) -> Manifest:
    """Write `manifest.json` over all files below `directory`; it must be the last file.

    known: the files whose digests were made as they were written. A link into an original
    checkpoint has no digest here: that file is one of the inputs.
    """
    found = _files(directory)
    ours = [file for file in found if not file.is_symlink() and file not in known]
    files = digests(directory, ours, report, "hashing")
    files |= {_name(directory, file): entry for file, entry in known.items()}
    files |= {_name(directory, file): {**_stamp(file)} for file in found if file.is_symlink()}
    manifest = {**inputs, "files": files}
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
    """The manifest in `output`, if made from `inputs` and every file is there as it was."""
    if not (output / MANIFEST).is_file():
        return None
    manifest = read_manifest(output)
    same = {**manifest, "files": None} == {**inputs, "files": None}
    return manifest if same and not changed_files(output, manifest) else None


def changed_files(directory: Path, manifest: Manifest) -> list[str]:
    """Files that are missing, more, or not as long as listed; links whose original has changed."""
    found = {_name(directory, file): _stamp(file) for file in _files(directory)}
    del found[MANIFEST]
    listed = {
        name: {key: entry[key] for key in ("size", "mtime_ns") if key in entry}
        for name, entry in manifest["files"].items()
    }
    return sorted(name for name in {*found, *listed} if found.get(name) != listed.get(name))


def digests(directory: Path, files: Iterable[Path], report: Report, step: str) -> dict[str, Entry]:
    """What the manifest says of each file, by its path in `directory`."""
    files, found = list(files), {}
    for done, file in enumerate(files):
        report(step, done, len(files))
        found[_name(directory, file)] = entry(file)
    report(step, len(files), len(files))
    return found


def _own_digest() -> str:
    """Of the code that builds: a build by older code is not the same build."""
    package = Path(dflash_trt.__file__).parent
    code = [file for file in package.rglob("*") if file.is_file()]
    code = [x for x in code if not {"model_repository", "__pycache__"} & {*x.parts}]
    models = [file for file in templates().rglob("*") if file.suffix in (".py", ".pbtxt")]
    return sha256([*sorted(code), *sorted(models)])


def _stamp(file: Path) -> dict[str, int]:
    """What shows without reading it that a file is another: of one of ours, the size is enough."""
    if not file.is_symlink():
        return {"size": file.stat().st_size}
    return stamp(file) if file.exists() else {}


def _files(directory: Path) -> list[Path]:
    """Every file below `directory`, sorted, but for what comes as it runs and is no part of it.

    Triton's Python leaves caches, and costs are kept beside the engines.
    """
    found = [Path(at, name) for at, _, names in os.walk(directory) for name in names]
    costs = str(directory / "engines" / COSTS_FILE)  # while it is written a number is behind it
    return sorted(
        file
        for file in found
        if "__pycache__" not in file.parts and not str(file).startswith(costs)
    )


def _name(directory: Path, file: Path) -> str:
    return file.relative_to(directory).as_posix()
