"""A build as an OCI image layout: ModelPack's artifact, or an image whose files lie in /models.

ModelPack: github.com/modelpack/model-spec (docs/spec.md, docs/config.md). The image is what KServe
calls a modelcar, and what Kubernetes mounts as a volume of kind `image`. Layers are plain tar
archives without times or owners, so that the same build packs to the same digests.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from dflash_trt.atomic import publish, sole_writer
from dflash_trt.build.manifest import (
    MANIFEST,
    SIGNATURE,
    Manifest,
    file_name,
    read_manifest,
    served_files,
)
from dflash_trt.errors import BuildError

Layout = Literal["modelpack", "modelcar"]
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
MODEL_CONFIG = "application/vnd.cncf.model.config.v1+json"
MODEL_LAYER = "application/vnd.cncf.model.{}.v1.tar"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar"
FILE_PATH = "org.cncf.model.filepath"
REF_NAME = "org.opencontainers.image.ref.name"
IN_IMAGE = "models/"  # where the files of a modelcar lie
LARGE = 16 << 20  # bytes from which on a file has a layer of its own
CHUNK = 1 << 20

Json = dict[str, Any]
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Layer:
    """Files that travel together; kind: ModelPack's word for what they are."""

    kind: str  # weight, weight.config or code
    files: list[str] = field(default_factory=list)


def pack(build: Path, output: Path, layout: Layout, report: Report) -> str:
    """Write the layout to `output`, all of it or nothing; returns the digest of its manifest.

    BuildError for a build with links, or an output that is something else.
    """
    manifest, output = read_manifest(build), output.resolve()
    if output.exists() and not (output / "oci-layout").is_file() and any(output.iterdir()):
        raise BuildError(f"{output} exists and is not an OCI layout", "Give another directory")
    files = [*served_files(build), *[build / SIGNATURE] * (build / SIGNATURE).is_file()]
    if links := [file for file in files if file.is_symlink()]:
        raise BuildError(
            f"{file_name(build, links[0])} is a link to its checkpoint",
            "Build with engine.weights: copy, then pack",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with sole_writer(output) as scratch:
        blobs = Blobs(scratch)
        descriptors = []
        layers = _layers({file_name(build, file): file.stat().st_size for file in files})
        for done, layer in enumerate(layers):
            report("packing", done, len(layers))
            descriptors.append(_layer(blobs, build, layer, layout))
        report("packing", len(layers), len(layers))
        top = _manifest(blobs, manifest, descriptors, layout)
        index = {"schemaVersion": 2, "manifests": [top]}
        (scratch / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
        (scratch / "index.json").write_text(json.dumps(index, indent=2) + "\n")
        publish(scratch, output)
    return str(top["digest"])


class Blobs:
    """The content-addressed files of an OCI layout."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "blobs" / "sha256"
        self._folder.mkdir(parents=True)

    def add(self, media_type: str, write: Callable[[BinaryIO], object]) -> Json:
        """Store what `write` writes; its descriptor."""
        part = self._folder / "part"
        with part.open("wb") as stream:
            hashed = _Hashed(stream)
            write(cast(BinaryIO, hashed))
            size = stream.tell()
        part.rename(self._folder / hashed.digest.hexdigest())
        digest = f"sha256:{hashed.digest.hexdigest()}"
        return {"mediaType": media_type, "digest": digest, "size": size}

    def add_json(self, media_type: str, value: Json) -> Json:
        return self.add(media_type, lambda stream: stream.write(json.dumps(value).encode()))


class _Hashed(io.RawIOBase):
    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.digest = stream, hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        return self._stream.write(data)


def _layers(sizes: Mapping[str, int]) -> list[Layer]:
    """Large files one by one, then the models as Triton reads them, then all else."""
    large = [Layer("weight", [name]) for name, size in sizes.items() if size >= LARGE]
    rest = [name for name, size in sizes.items() if size < LARGE]
    code = [name for name in rest if name.endswith((".py", ".sh", ".pbtxt"))]
    others = [name for name in rest if name not in {*code, MANIFEST}]
    # the manifest last, as `build` writes it
    return [*large, Layer("code", code), Layer("weight.config", [*others, MANIFEST])]


def _layer(blobs: Blobs, build: Path, layer: Layer, layout: Layout) -> Json:
    prefix = IN_IMAGE if layout == "modelcar" else ""

    def write(stream: BinaryIO) -> None:
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for name in layer.files:
                file = build / name
                entry = tarfile.TarInfo(prefix + name)
                entry.size = file.stat().st_size
                entry.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
                with file.open("rb") as content:
                    archive.addfile(entry, content)

    if layout == "modelcar":
        return blobs.add(IMAGE_LAYER, write)
    found = blobs.add(MODEL_LAYER.format(layer.kind), write)
    if len(layer.files) == 1:
        found["annotations"] = {FILE_PATH: layer.files[0]}
    return found


def _manifest(blobs: Blobs, manifest: Manifest, layers: list[Json], layout: Layout) -> Json:
    digests = [layer["digest"] for layer in layers]
    kind = manifest["config"]["engine"]["kind"]
    top: Json = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE}
    if layout == "modelpack":
        known: Json = {
            "descriptor": {"name": manifest["name"], "version": manifest["dflash_trt"]["version"]},
            "config": {
                "architecture": "transformer",
                "format": {"onnxruntime": "onnx", "tensorrt_llm": "safetensors"}.get(kind, kind),
                "capabilities": {"inputTypes": ["text"], "outputTypes": ["text"]},
            },
            "modelfs": {"type": "layers", "diffIds": digests},
        }
        top |= {"artifactType": ARTIFACT, "config": blobs.add_json(MODEL_CONFIG, known)}
    else:
        # the files run on any processor; the field is not optional
        image = {"architecture": "amd64", "os": "linux", "config": {}}
        image["rootfs"] = {"type": "layers", "diff_ids": digests}
        top["config"] = blobs.add_json(IMAGE_CONFIG, image)
    found = blobs.add_json(MANIFEST_TYPE, {**top, "layers": layers})
    if layout == "modelpack":
        found["artifactType"] = ARTIFACT
    return {**found, "annotations": {REF_NAME: manifest["name"]}}
