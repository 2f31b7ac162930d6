"""Writer of `manifest.json`: a build's inputs and all its files, with digests."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt.build.job import Job, Written
from dflash_trt.build.manifest import (
    MANIFEST,
    Manifest,
    differences,
    file_name,
    file_stamp,
    files_of,
    read_manifest,
)
from dflash_trt.build.repository import templates
from dflash_trt.checkpoints import Report
from dflash_trt.files import Entry, entry, sha256

# outputs in a manifest; the rest are inputs
MADE = {"files", "quantization"}
# config fields left out, because the inputs themselves are recorded
LEFT_OUT: dict[str, Any] = dict.fromkeys(("name", "target", "drafter", "drafters"), True) | {
    "engine": {"quantize": {"calibration": {"prompts": True}}}
}


def inputs_manifest(job: Job, report: Report) -> Manifest:
    """Return everything that determines a build's bytes; no paths or times, for reproducibility."""
    config, models = job.config, job.models
    inputs = {
        role: digests(model.at.directory, sorted(set(model.files)), report, f"hashing the {role}")
        for role, model in models.items()
    }
    manifest = {
        "dflash_trt": {"version": dflash_trt.__version__, "sha256": _own_digest()},
        "name": config.name,
        "config": config.model_dump(mode="json", exclude=LEFT_OUT),
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
    directory: Path, inputs: Manifest, written: Written, job: Job, report: Report
) -> Manifest:
    """Write `manifest.json` over all files below `directory`; must be the last file written.

    A link into an original checkpoint has that input's digest.
    """
    known = written.digests
    originals = {
        (model.at.directory / name).resolve(): entry
        for role, model in job.models.items()
        for name, entry in inputs["inputs"][role].items()
    }
    found = files_of(directory)
    ours = [file for file in found if not file.is_symlink() and file not in known]
    files = digests(directory, ours, report, "hashing")
    files |= {file_name(directory, file): entry for file, entry in known.items()}
    files |= {
        file_name(directory, file): {**originals[file.resolve()], **file_stamp(file)}
        for file in found
        if file.is_symlink()
    }
    cost = {"quantization": asdict(written.cost)} if written.cost else {}
    manifest = {**inputs, **cost, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def matching_manifest(output: Path, inputs: Manifest, report: Report) -> Manifest | None:
    """Return the manifest in `output` if it has the same inputs and its files are unchanged."""
    if not (output / MANIFEST).is_file():
        return None
    manifest = read_manifest(output)
    same = {key: value for key, value in manifest.items() if key not in MADE} == inputs
    return manifest if same and not differences(output, manifest, "full", report) else None


def digests(directory: Path, files: Iterable[Path], report: Report, step: str) -> dict[str, Entry]:
    """Return the manifest's entries of files, by path in `directory`."""
    files, found = list(files), {}
    for done, file in enumerate(files):
        report(step, done, len(files))
        found[file_name(directory, file)] = entry(file)
    report(step, len(files), len(files))
    return found


def _own_digest() -> str:
    """Return a digest of the package's code, because other code may build other bytes."""
    package = Path(dflash_trt.__file__).parent
    code = [file for file in package.rglob("*") if file.is_file()]
    code = [x for x in code if not {"model_repository", "__pycache__"} & {*x.parts}]
    models = [file for file in templates().rglob("*") if file.suffix in (".py", ".pbtxt")]
    return sha256([*sorted(code), *sorted(models)])
