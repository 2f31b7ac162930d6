"""What `dflash-trt inspect` says of a built directory: the costs of rounds that are kept there."""

from pathlib import Path
from typing import Any

from dflash_trt.build.manifest import MANIFEST, read_manifest
from dflash_trt.decoding.speculation.kept_costs import kept_costs, this_machine


def is_built(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def inspect_built(directory: Path) -> dict[str, Any]:
    """The build, and `costs` by machine, the last one measured last.

    Of each `machine`, `here` (whether it is this one), and the fields of `Costs`. BuildError or
    EngineError where the directory is damaged.
    """
    manifest = read_manifest(directory)
    kept = kept_costs(directory / "engines")
    here = {**this_machine(directory / "engines", mode="")} if kept else {}
    here = {name: value for name, value in here.items() if name not in ("mode", "threads")}
    return {
        "directory": str(directory),
        "name": manifest["name"],
        "engine_kind": manifest["config"]["engine"]["kind"],
        "costs": [
            {"machine": machine, "here": here.items() <= machine.items(), **costs.as_json()}
            for machine, costs in kept
        ],
    }
