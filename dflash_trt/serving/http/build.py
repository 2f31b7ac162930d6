"""What the server runs: the build, and the drafter that `update-drafter` put in its place."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.builder.identity import about_build
from dflash_trt.builder.manifest import SHORT
from dflash_trt.serving.http import ServedDrafter

METRIC = "dflash_build_info"
HELP = "The build that is served, and that whose drafter serves; always 1"


class ServedBuild:
    def __init__(self, directory: Path, since: str) -> None:
        self._about = about_build(directory)
        self._since = since  # ISO 8601
        self.drafters: tuple[ServedDrafter, ...] = ()  # of other builds, the last one serves

    @property
    def fingerprint(self) -> str:
        return f"fp_{self._about['digest'][:SHORT]}"

    def facts(self) -> dict[str, Any]:
        swaps = [asdict(drafter) for drafter in self.drafters]
        return self._about | {"serving_since": self._since, "drafter_swaps": swaps}

    def metric(self) -> str:
        """Return `dflash_build_info` in Prometheus' text format."""
        about = self._about
        drafter = self.drafters[-1].digest if self.drafters else about["digest"]
        labels = {
            "build": about["name"],
            "digest": about["digest"][:SHORT],
            "drafter": drafter[:SHORT],
            "engine_kind": about["engine_kind"],
            "version": about["program"]["version"],
        }
        inside = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        return f"# HELP {METRIC} {HELP}\n# TYPE {METRIC} gauge\n{METRIC}{{{inside}}} 1\n"
