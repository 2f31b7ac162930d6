"""A checked pair, ready to be built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.checkpoints import Located
from dflash_trt.checkpoints.findings import Finding
from dflash_trt.config import BuildConfig
from dflash_trt.files import Entry

if TYPE_CHECKING:
    from dflash_trt.build.quantization_cost import Cost


@dataclass(frozen=True)
class Input:
    """One model: its location, and the files that affect the build's bytes."""

    at: Located
    files: list[Path]
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
        """The models by role."""
        return {"target": self.target} | ({"drafter": self.drafter} if self.drafter else {})
