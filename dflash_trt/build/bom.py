"""Bill of materials: CycloneDX 1.6, with the models as machine-learning components.

It depends only on the build's inputs, so that it is reproducible: no time, no random serial number.
"""

import json
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash_trt.build.job import Job
from dflash_trt.build.manifest import Manifest
from dflash_trt.checkpoints import read_card, read_json
from dflash_trt.files import Entry

BOM = "bom.cdx.json"
# the Hub's names of licenses in SPDX; others keep the card's name
SPDX = {
    name.lower(): name
    for name in (
        *("Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "Unlicense"),
        *("GPL-2.0-only", "GPL-3.0-only", "LGPL-3.0-only", "AGPL-3.0-only", "CC0-1.0"),
        *("CC-BY-4.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0", "CC-BY-NC-SA-4.0", "PSF-2.0"),
    )
}
ALGORITHMS = {"sha256": "SHA-256", "blake3": "BLAKE3"}
# libraries whose version affects a build's bytes
LIBRARIES = ("onnx-ir", "ml-dtypes", "numpy", "safetensors", "tokenizers", "gguf", "tensorrt")

Json = dict[str, Any]


def write_bom(directory: Path, inputs: Manifest, job: Job) -> None:
    """Write `bom.cdx.json`; inputs: their part of the manifest."""
    text = json.dumps(inputs, sort_keys=True)
    models = job.models
    components = [_model(role, model.at.directory, inputs) for role, model in models.items()]
    # a drafter needs the target's embedding, head and features
    needs = [{"ref": "drafter", "dependsOn": ["target"]}] if job.drafter else []
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, text).urn,
        "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": "build", "name": inputs["name"]},
            "tools": {"components": [_own(inputs["dflash_trt"]), *_libraries()]},
        },
        "components": components,
        "dependencies": [{"ref": "build", "dependsOn": list(models)}, *needs],
    }
    (directory / BOM).write_text(json.dumps(bom, indent=2) + "\n", encoding="utf-8")


def _model(role: str, directory: Path, inputs: Manifest) -> Json:
    hub, card = inputs["hub"].get(role, {}), read_card(directory)
    config = read_json(directory / "config.json")
    named = [("architectureFamily", config.get("model_type"))]
    named += [("modelArchitecture", name) for name in (config.get("architectures") or [])[:1]]
    parameters: Json = {"task": "text-generation"}
    parameters |= {key: value for key, value in named if isinstance(value, str)}
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
    if card.license:
        known = SPDX.get(card.license.lower())
        component["licenses"] = [{"license": {"id": known} if known else {"name": card.license}}]
    return component


def _files(role: str, files: Mapping[str, Entry]) -> Iterable[Json]:
    return [
        {
            "type": "file",
            "bom-ref": f"{role}/{name}",
            "name": name,
            "hashes": [
                {"alg": alg, "content": entry[kind]}
                for kind, alg in ALGORITHMS.items()
                if kind in entry
            ],
        }
        for name, entry in files.items()
    ]


def _own(said: Mapping[str, str]) -> Json:
    return {
        "type": "application",
        "name": "dflash-trt",
        "version": said["version"],
        "hashes": [{"alg": "SHA-256", "content": said["sha256"]}],
    }


def _libraries() -> list[Json]:
    found = []
    for name in LIBRARIES:
        try:
            number = version(name)
        except PackageNotFoundError:
            continue
        purl = f"pkg:pypi/{name}@{number}"
        found.append({"type": "library", "name": name, "version": number, "purl": purl})
    return found
