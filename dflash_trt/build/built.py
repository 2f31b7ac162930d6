"""Description of a build for `dflash-trt inspect`: the measured costs in `costs.json`."""

from pathlib import Path
from typing import Any

from dflash_trt.build.manifest import MANIFEST, read_manifest
from dflash_trt.decoding.speculation import kept_profiles, this_machine


def is_built(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def inspect_built(directory: Path) -> dict[str, Any]:
    """Return the build, and `costs` by machine, latest last.

    Each has `machine`, `here` (whether it is this one), and the fields of `CostProfile`. Raises
    BuildError or EngineError for a damaged directory.
    """
    manifest = read_manifest(directory)
    kept = kept_profiles(directory / "engines")
    here = this_machine(directory / "engines", "").partition("; ")[0] if kept else ""
    return {
        "directory": str(directory),
        "name": manifest["name"],
        "engine_kind": manifest["config"]["engine"]["kind"],
        "costs": [
            {"machine": name, "here": name.startswith(f"{here}; "), **profile.as_json()}
            for name, profile in kept.items()
        ],
    }
