"""Known faults of TensorRT-LLM by version, GPU and feature: faults.yaml, whose head explains it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from dflash_trt.checkpoints.checks import Found
from dflash_trt.config import Version
from dflash_trt.tensorrt_llm.arguments import LlmArgs, has, read_table


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table."""

    fault: str
    seen: str
    link: str
    fix: str
    versions: Collection[Version] = ()  # this and the next: empty for any
    before: Version | None = None
    sm: Collection[int] = ()
    ranks: int = 1
    target: str = ""
    args: Mapping[str, list[Any] | Literal["not_null"]] = field(default_factory=dict)
    packages: Mapping[str, list[str]] = field(default_factory=dict)

    def touches(self, args: LlmArgs, sm: Collection[int], architecture: str) -> bool:
        return (
            (not self.versions or args.version in self.versions)
            and (self.before is None or not has(args.version, self.before))
            and (not self.sm or not {*self.sm}.isdisjoint(sm))
            and args.tensor_parallel_size >= self.ranks
            and re.search(self.target, architecture) is not None
            and all(_is_one(args.value(name), of) for name, of in self.args.items())
            and all(_installed(name) in of for name, of in self.packages.items())
        )

    def __str__(self) -> str:
        return f"{self.fault} ({self.link}, {self.seen})"


@cache
def faults() -> tuple[Fault, ...]:
    rows = read_table("faults.yaml")
    return tuple(Fault(**row | {"seen": str(row["seen"])}) for row in rows)


def look_up(args: LlmArgs, sm: Collection[int], architecture: str) -> Found:
    """Whether a known fault touches these arguments, on GPUs of these compute capabilities."""
    found = [fault for fault in faults() if fault.touches(args, sm, architecture)]
    if not found:
        return Found(True, f"none of {len(faults())} known faults of TensorRT-LLM touches it")
    return Found(False, "; ".join(map(str, found)), "; ".join(fault.fix for fault in found))


def _is_one(value: Any, of: list[Any] | Literal["not_null"]) -> bool:
    return value is not None if of == "not_null" else value in of


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
