"""What a build was made of: its job, `manifest.json`, and the bill of materials.

The bill is CycloneDX 1.6, with the models as machine-learning components. It depends only on the
build's inputs, so that it is reproducible: no time, no random serial number.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
    version,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from dflash_trt.builder.deployment import REQUIREMENTS, image_requirements
from dflash_trt.builder.manifest import (
    MANIFEST,
    Manifest,
    build_digest,
    differences,
    file_name,
    files_of,
    read_manifest,
    write_digest,
)
from dflash_trt.builder.program import program
from dflash_trt.checkpoints import Located, Report, read_card
from dflash_trt.checks import Finding
from dflash_trt.config import BuildConfig
from dflash_trt.files import Entry, manifest_entry
from dflash_trt.weights import read_json

if TYPE_CHECKING:
    from dflash_trt.builder.acceptance_probe import Cost

Json = dict[str, Any]
BOM = "bom.cdx.json"
ALGORITHMS = {"sha256": "SHA-256", "blake3": "BLAKE3"}
# libraries whose version affects a build's bytes
LIBRARIES = ("onnx-ir", "ml-dtypes", "numpy", "safetensors", "tokenizers", "gguf", "tensorrt")
# outputs in a manifest; the rest are inputs
MADE = {"files", "quantization"}
# config fields left out, because the inputs themselves are recorded
LEFT_OUT: dict[str, Any] = {
    **dict.fromkeys(("name", "target", "drafter", "drafters", "package_lock"), True),
    "engine": {"calibration": True},
}


@dataclass(frozen=True)
class Input:
    at: Located
    files: list[Path]  # that affect the build's bytes
    known: Mapping[str, Any]  # recorded in the manifest


@dataclass(frozen=True)
class Written:
    digests: Mapping[Path, Entry] = field(default_factory=dict)  # computed while writing
    cost: "Cost | None" = None  # of quantized weights
    warnings: list[Finding] = field(default_factory=list)  # about the written files


@dataclass(frozen=True)
class Job:
    config: BuildConfig  # with defaults filled in
    target: Input
    drafter: Input | None  # None: the method needs none
    warnings: list[Finding]
    write: Callable[[Path], Written]  # into an empty directory: engines and model repository

    @property
    def models(self) -> dict[str, Input]:
        if self.drafter is None:
            return {"target": self.target}
        return {"target": self.target, "drafter": self.drafter}


def inputs_manifest(job: Job, text: str, report: Report) -> Manifest:
    """Return everything that determines a build's bytes; no paths or times, for reproducibility.

    text: the config as it was written; "": it comes from no file.
    """
    config = job.config
    models = job.models
    inputs = {
        role: digests(model.at.directory, sorted(set(model.files)), report, f"hashing the {role}")
        for role, model in models.items()
    }
    manifest = {
        "dflash_trt": program().as_manifest(),
        "name": config.name,
        "config_text": hashlib.sha256(text.encode()).hexdigest() if text else None,
        "config": config.model_dump(mode="json", exclude=LEFT_OUT),
        **{role: model.known for role, model in models.items()},
        "inputs": inputs,
        "hub": {
            role: {"id": getattr(config, role).hub, "commit": model.at.commit}
            for role, model in models.items()
            if model.at.commit
        },
        "packages": _packages(config),
        "package_lock": _lock_digest(config),
    }
    return dict(json.loads(json.dumps(manifest)))  # tuples become lists, as in a file


def _lock_digest(config: BuildConfig) -> str | None:
    """Return the digest of what is locked; None without a lock. ConfigError for a wrong one."""
    if config.package_lock is None:
        return None
    lines = "\n".join(image_requirements(config).values())
    return hashlib.sha256(lines.encode()).hexdigest()


def _packages(config: BuildConfig) -> dict[str, dict[str, str]]:
    """Return the installed packages that hold models, by role, as their index names them."""
    packages = {}
    for role, source in config.sources.items():
        if source.package is None:
            continue
        package = _distribution_of(source.package)
        name, number = (source.package, "") if package is None else (package.name, package.version)
        packages[role] = {"name": name, "version": number, "file": str(source.gguf)}
    return packages


def _distribution_of(module: str) -> Distribution | None:
    """Return the installed package that has a module; most have its name."""
    with suppress(PackageNotFoundError):
        named = distribution(module)
        if any(file.parts[0] == module for file in named.files or ()):
            return named
    names = packages_distributions().get(module)  # reads the lists of files of all packages
    return distribution(names[0]) if names else None


def write_manifest(directory: Path, inputs: Manifest, written: Written, report: Report) -> Manifest:
    """Write `manifest.json` over all files below `directory`, and its digest into `deploy/`."""
    known = written.digests
    left = [file for file in files_of(directory) if file not in known]
    files = digests(directory, left, report, "hashing")
    files |= {file_name(directory, file): entry for file, entry in known.items()}
    cost = {"quantization": asdict(written.cost)} if written.cost else {}
    manifest = {**inputs, **cost, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    write_digest(directory, build_digest(directory))
    return manifest


def matching_manifest(output: Path, inputs: Manifest, report: Report) -> Manifest | None:
    if not (output / MANIFEST).is_file():
        return None
    manifest = read_manifest(output)
    if _of_any_commit(manifest) != _of_any_commit(inputs):
        return None
    return None if differences(output, manifest, "full", report) else manifest


def _of_any_commit(manifest: Manifest) -> Manifest:
    """Return the inputs without the program's commit: the digest of its code says what it is."""
    inputs = {key: value for key, value in manifest.items() if key not in MADE}
    made_by = {key: value for key, value in manifest["dflash_trt"].items() if key != "commit"}
    return inputs | {"dflash_trt": made_by}


def digests(directory: Path, files: Iterable[Path], report: Report, step: str) -> dict[str, Entry]:
    files = list(files)
    entries = {}
    for done, file in enumerate(files):
        report(step, done, len(files))
        entries[file_name(directory, file)] = manifest_entry(file)
    report(step, len(files), len(files))
    return entries


def write_bom(directory: Path, inputs: Manifest, job: Job) -> None:
    """Write the bill: both models, and the packages of the image with their versions."""
    text = json.dumps(inputs, sort_keys=True)
    made_by = inputs["dflash_trt"]
    application = {
        "type": "application",
        "name": "dflash-trt",
        "version": made_by["version"],
        "hashes": [{"alg": "SHA-256", "content": made_by["sha256"]}],
    }
    models = job.models
    components = [_model(role, model.at.directory, inputs) for role, model in models.items()]
    packages = (directory / REQUIREMENTS).read_text("utf-8").splitlines()
    components += map(_package_component, packages)
    # a drafter needs the target's embedding, head and features
    needs = [{"ref": "drafter", "dependsOn": ["target"]}] if job.drafter else []
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, text).urn,
        "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": "build", "name": inputs["name"]},
            "tools": {"components": [application, *_libraries()]},
        },
        "components": components,
        "dependencies": [{"ref": "build", "dependsOn": list(models)}, *needs],
    }
    (directory / BOM).write_text(json.dumps(bom, indent=2) + "\n", encoding="utf-8")


def _model(role: str, directory: Path, inputs: Manifest) -> Json:
    hub = inputs["hub"].get(role, {})
    card = read_card(directory)
    config = read_json(directory / "config.json")
    parameters: Json = {"task": "text-generation"}
    family = config.get("model_type")
    if isinstance(family, str):
        parameters["architectureFamily"] = family
    for name in (config.get("architectures") or [])[:1]:
        if isinstance(name, str):
            parameters["modelArchitecture"] = name
    if card.datasets:
        parameters["datasets"] = [{"type": "dataset", "name": name} for name in card.datasets]
    component: Json = {
        "type": "machine-learning-model",
        "bom-ref": role,
        "name": hub.get("id", directory.name),
        "modelCard": {"modelParameters": parameters},
        "components": _files(role, inputs["inputs"][role]),
    }
    if hub:
        component["version"] = hub["commit"]
        component["purl"] = f"pkg:huggingface/{hub['id']}@{hub['commit']}"
    elif role in inputs["packages"]:
        package = inputs["packages"][role]
        component["version"] = package["version"]
        component["purl"] = f"pkg:pypi/{package['name']}@{package['version']}"
    if card.license:
        component["licenses"] = [{"license": {"name": card.license}}]
    return component


def _files(role: str, files: Mapping[str, Entry]) -> list[Json]:
    listed = []
    for name, entry in files.items():
        hashes = [
            {"alg": title, "content": entry[algorithm]}
            for algorithm, title in ALGORITHMS.items()
            if algorithm in entry
        ]
        listed.append({"type": "file", "bom-ref": f"{role}/{name}", "name": name, "hashes": hashes})
    return listed


def _package_component(line: str) -> Json:
    """Return a package of the image: pinned, or by name where it was not installed here."""
    pin, *hashes = line.split(" --hash=sha256:")
    requirement = Requirement(pin)
    name = requirement.name
    number = str(requirement.specifier).removeprefix("==")
    if not number[:1].isdigit():
        return {"type": "library", "bom-ref": f"image/{pin}", "name": pin}
    component: Json = {
        "type": "library",
        "bom-ref": f"image/{name}",
        "name": name,
        "version": number,
        "purl": f"pkg:pypi/{name}@{number}",
    }
    if hashes:
        component["hashes"] = [{"alg": "SHA-256", "content": digest} for digest in hashes]
    return component


def _libraries() -> Iterator[Json]:
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            number = version(name)
            purl = f"pkg:pypi/{name}@{number}"
            yield {"type": "library", "name": name, "version": number, "purl": purl}
