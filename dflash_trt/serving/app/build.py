"""What the server runs: the build, and the drafter that `update-drafter` put in its place."""

import json
from pathlib import Path
from typing import Any

from dflash_trt.build.identity import about_build
from dflash_trt.build.manifest import SHORT

METRIC = "dflash_build_info"
HELP = "The build that is served, and that whose drafter serves; always 1"


class ServedBuild:
    def __init__(self, directory: Path, since: str) -> None:
        self._about = about_build(directory)
        self._since = since  # ISO 8601
        self._swaps: list[dict[str, str]] = []  # drafters of other builds, the last one serves

    @property
    def fingerprint(self) -> str:
        return f"fp_{self._about['digest'][:SHORT]}"

    def update_drafter(self, swap: dict[str, str]) -> None:
        """Note a drafter; swap: `name` and `digest` of its build, and `since`, ISO 8601."""
        self._swaps.append(swap)

    def facts(self) -> dict[str, Any]:
        return self._about | {"serving_since": self._since, "drafter_swaps": self._swaps}

    def metric(self) -> str:
        """Return `dflash_build_info` in Prometheus' text format."""
        about = self._about
        drafter = self._swaps[-1]["digest"] if self._swaps else about["digest"]
        labels = {
            "build": about["name"],
            "digest": about["digest"][:SHORT],
            "drafter": drafter[:SHORT],
            "engine_kind": about["engine_kind"],
            "version": about["program"]["version"],
        }
        inside = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        return f"# HELP {METRIC} {HELP}\n# TYPE {METRIC} gauge\n{METRIC}{{{inside}}} 1\n"
