"""What is examined: a build, on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_trt.build import Depth
from dflash_trt.tensorrt_llm import KIND, BundleInfo, SeenGpu, gpus, read_info, read_llm_args

GIB = 1 << 30


@dataclass(frozen=True, eq=False)
class Patient:
    """A build, and this machine as far as it was looked at."""

    directory: Path
    manifest: dict[str, Any] = field(repr=False)
    depth: Depth | None  # of the check of its files

    @property
    def kind(self) -> str:
        return str(self.manifest["config"]["engine"]["kind"])

    @property
    def engine(self) -> Path:
        return self.directory / "engines" / KIND

    @cached_property
    def info(self) -> BundleInfo:
        return read_info(self.engine)

    @cached_property
    def args(self) -> dict[str, Any]:
        return read_llm_args(self.engine)

    @cached_property
    def all_gpus(self) -> list[SeenGpu]:
        return gpus()

    @property
    def gpus(self) -> list[SeenGpu]:
        """Those that the build takes."""
        return self.all_gpus[: self.info.gpus]


def last_line(text: str) -> str:
    """Where a Python process says why it ended."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1]


def more(found: Sequence[object]) -> str:
    """What to say after naming the first of them."""
    return f" and {len(found) - 1} more" if len(found) > 1 else ""
