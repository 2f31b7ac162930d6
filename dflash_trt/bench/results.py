"""Results of `bench engine`, as in its JSON file, and statistics of passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from dflash_trt.builder.identity import Record
from dflash_trt.builder.manifest import build_digest
from dflash_trt.builder.program import program
from dflash_trt.machine import this_machine, versions


def kept_fractions(committed_per_round: Sequence[int]) -> list[float]:
    return [
        sum(count > i for count in committed_per_round) / len(committed_per_round)
        for i in range(1, max(committed_per_round, default=1))
    ]


@dataclass(kw_only=True)
class Sample:
    seconds: float = 0.0
    tokens: int = 0  # generated
    rounds: int = 0  # of all sequences; each one's first token is from its prompt
    steps: int = 0  # engine calls of these rounds; one call serves a whole batch
    verify: float = 0.0  # seconds in the target and accepting; with those below, all `seconds`
    draft: float = 0.0
    scheduler: float = 0.0  # and proposing, and all else
    prefill: float = 0.0
    full_seconds: float = 0.0  # in rounds with all streams; `full_tokens` are their tokens
    full_tokens: int = 0


@dataclass(frozen=True)
class SamplingRule:
    """Of what a text is sampled, as in `SamplingParams`."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0

    def __str__(self) -> str:
        if not self.temperature:
            return ""
        parts = [f"temperature {self.temperature:g}"]
        if self.top_p < 1:
            parts.append(f"top_p {self.top_p:g}")
        if self.top_k:
            parts.append(f"top_k {self.top_k}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting, measured in turns with the others of its group."""

    task: str  # source of the prompts
    method: str  # of `engine.METHODS`
    draft_tokens: int | None  # None: a whole block; adaptive: chosen by the policy
    batch: int
    rule: SamplingRule
    samples: list[Sample] = field(default_factory=list)  # one for each pass over the prompts
    kept: list[float] = field(default_factory=list)  # fraction of rounds that kept draft 1, 2, ..
    identical: tuple[int, int] = (0, 0)  # texts equal to plain decoding's, and all

    @property
    def tau(self) -> float:
        """Tokens committed per round."""
        return 1 + sum(self.kept)

    @property
    def setting(self) -> str:
        """Return what was decoded how, without the task."""
        return str(self).removeprefix(f"{self.task}, ")

    def __str__(self) -> str:
        drafts = "auto" if self.draft_tokens is None else str(self.draft_tokens)
        parts = [self.task, self.method]
        if self.method != "plain":
            parts.append(f"{drafts} drafts")
        parts.append(f"batch {self.batch}")
        if self.rule.temperature:
            parts.append(str(self.rule))
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    options: Mapping[str, int]
    cells: list[Cell]
    machine: Mapping[str, Any] = field(default_factory=this_machine)
    versions: Mapping[str, str] = field(default_factory=versions)


def tokens_per_second(cell: Cell) -> list[float]:
    return [sample.tokens / sample.seconds for sample in cell.samples]


def speedups(run: Run, cell: Cell) -> list[float]:
    """Return each pass's speedup over the plain pass beside it, with equal machine noise."""
    setting = (cell.task, cell.batch, cell.rule)
    plain = next(other for other in run.cells if (other.task, other.batch, other.rule) == setting)
    pairs = zip(tokens_per_second(cell), tokens_per_second(plain), strict=True)
    return [rate / plain_rate for rate, plain_rate in pairs]


def step_milliseconds(cell: Cell) -> list[float]:
    """Return the median of a step of the whole batch: target, drafter, scheduler."""
    return [
        median(1e3 * getattr(sample, name) / max(sample.steps, 1) for sample in cell.samples)
        for name in ("verify", "draft", "scheduler")
    ]


def record_of(directory: Path, run: Run) -> Record:
    """Return what is kept of a run beside the measured build."""
    acceptance: dict[str, dict[str, float]] = {}
    for cell in run.cells:
        if cell.method != "plain":
            acceptance.setdefault(cell.task, {})[cell.setting] = round(cell.tau, 4)
    return Record(
        build=build_digest(directory),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        program=str(program()),
        machine=f"{run.machine['cpu']}, {run.machine['cores']} cores",
        acceptance=acceptance,
    )
