"""A checked pair, ready to be built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.checkpoints import Located
from dflash_trt.checkpoints.checks import Finding
from dflash_trt.config import BuildConfig
from dflash_trt.digests import Entry

if TYPE_CHECKING:
    from dflash_trt.build.quantization import Cost
    from dflash_trt.engines.accuracy import Accuracy


@dataclass(frozen=True)
class Input:
    """One model: where it lies, and which of its files decide the bytes of the build."""

    at: Located
    files: list[Path]
    known: Mapping[str, Any]  # what was read of it, for the manifest


@dataclass(frozen=True)
class Written:
    digests: Mapping[Path, Entry] = field(default_factory=dict)  # made as files were written
    accuracy: "Accuracy | None" = None  # of quantised weights
    cost: "Cost | None" = None  # of a quantised target
    warnings: list[Finding] = field(default_factory=list)  # of what was written


@dataclass(frozen=True)
class Job:
    config: BuildConfig  # with what it leaves open filled in
    target: Input
    drafter: Input | None  # None: the method needs none
    warnings: list[Finding]
    write: Callable[[Path], Written]  # into an empty directory: engines and model repository

    @property
    def models(self) -> dict[str, Input]:
        """By role."""
        return {"target": self.target} | ({"drafter": self.drafter} if self.drafter else {})
