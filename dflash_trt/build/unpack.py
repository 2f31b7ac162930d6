"""The build in an OCI image layout that `pack` wrote, also after its way through a registry."""

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dflash_trt.atomic import publish, sole_writer
from dflash_trt.build.manifest import MANIFEST, check_build
from dflash_trt.build.pack import IMAGE_LAYER, IN_IMAGE, MODEL_LAYER, Report
from dflash_trt.digests import sha256
from dflash_trt.errors import BuildError
from dflash_trt.files import Size, open_regular, read_as

LAYERS = {IMAGE_LAYER, *(MODEL_LAYER.format(x) for x in ("weight", "weight.config", "code"))}


@dataclass(frozen=True)
class _Descriptor:
    mediaType: str
    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    size: Size


@dataclass(frozen=True)
class _Index:
    manifests: Annotated[list[_Descriptor], Field(min_length=1, max_length=1)]


@dataclass(frozen=True)
class _Manifest:
    layers: list[_Descriptor]


def unpack(layout: Path, output: Path, report: Report) -> None:
    """Write the build to `output`, all of it or nothing; an older build there is replaced.

    BuildError when a digest or a file is not as the layout and the build's manifest say, or
    `output` is something else.
    """
    output = output.resolve()
    if output.exists() and not (output / MANIFEST).is_file() and any(output.iterdir()):
        raise BuildError(f"{output} exists and is not a build", "Give another directory")
    try:
        (top,) = read_as(layout / "index.json", _Index).manifests
        layers = read_as(_blob(layout, top), _Manifest).layers
        output.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(output) as scratch:
            for done, layer in enumerate(layers):
                report("unpacking", done, len(layers))
                _extract(layout, layer, scratch)
            report("unpacking", len(layers), len(layers))
            check_build(scratch, "full", report)
            publish(scratch, output)
    except (OSError, ValueError, tarfile.TarError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BuildError(
            f"{layout} cannot be unpacked: {reason}", "Copy it here again, or pack the build again"
        ) from error


def _blob(layout: Path, its: _Descriptor) -> Path:
    """The file of a descriptor; ValueError unless it is what the descriptor says."""
    file = layout / "blobs" / its.digest.replace(":", "/")
    with open_regular(file):
        if file.stat().st_size != its.size or f"sha256:{sha256([file])}" != its.digest:
            raise ValueError(f"the blob {its.digest} has changed")
    return file


def _extract(layout: Path, layer: _Descriptor, directory: Path) -> None:
    if layer.mediaType not in LAYERS:
        raise ValueError(f"`pack` writes no layer of the type {layer.mediaType}")
    with tarfile.open(_blob(layout, layer), "r:") as archive:
        for member in archive:
            member.name = member.name.removeprefix(IN_IMAGE)
            if not member.isreg():
                raise ValueError(f"{member.name} in it is no file")
            archive.extract(member, directory, filter="data")
