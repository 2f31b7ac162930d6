"""What a benchmark measured, as it lies in its JSON file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.files import read_as
from dflash_trt.machine import machine, versions

PERCENTILES = (50, 90, 99)
GROUP = ("task", "batch", "context", "threads", "temperature")
SETTING = (*GROUP, "method", "draft_tokens")


def kept(committed: Sequence[int]) -> list[float]:
    """Share of rounds that kept draft 1, 2, ..; committed: tokens of each round."""
    return [
        sum(count > i for count in committed) / len(committed)
        for i in range(1, max(committed, default=1))
    ]


def in_users(count: int) -> str:
    """As a load is called."""
    return f"{count} user{'s' * (count != 1)}"


@dataclass(kw_only=True)
class Sample:
    """One pass over the prompts."""

    seconds: float = 0.0
    tokens: int = 0  # generated
    rounds: int = 0  # of all sequences; the first token of each comes from its prompt
    steps: int = 0  # engine calls of these rounds; one call serves a whole batch
    verify: float = 0.0  # seconds in the target; with those below, the parts of `seconds`
    draft: float = 0.0
    sampling: float = 0.0  # accepting and proposing
    scheduler: float = 0.0
    prefill: float = 0.0
    full_seconds: float = 0.0  # in rounds of all streams; `full_tokens` are their tokens
    full_tokens: int = 0
    # rounds of single sequences by what was verified, as metrics count it
    choices: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting, measured in turns with the others of its group."""

    task: str  # where the prompts are from
    method: str  # of `engine.METHODS`
    draft_tokens: int | None  # None: a whole block; adaptive: as it pays
    batch: int
    context: int | None  # tokens of each prompt; None: as they come
    threads: int
    temperature: float
    samples: list[Sample] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)  # share of rounds that kept draft 1, 2, ..
    # texts equal to plain decoding's, and all; None: sampled, so that they differ
    identical: tuple[int, int] | None = None

    @property
    def tau(self) -> float:
        """Tokens committed by a round."""
        return 1 + sum(self.kept)

    @property
    def setting(self) -> tuple[Any, ...]:
        """Cells of two runs with the same setting are compared."""
        return tuple(getattr(self, name) for name in SETTING)

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells of one group ran in turns, so that their samples pair up."""
        return tuple(getattr(self, name) for name in GROUP)


@dataclass(frozen=True, kw_only=True)
class Run:
    """`bench engine` of a built directory."""

    name: str
    target: str
    drafter: str
    options: Mapping[str, Any]
    cells: list[Cell]
    peak_memory: int  # bytes resident, of the whole process
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    complete: bool = True  # False: interrupted, what was measured is kept
    hub: Mapping[str, str] = field(default_factory=dict)  # ids there of target and drafter
    format: int = 1


@dataclass(frozen=True, kw_only=True)
class Level:
    """One load and what came of it. Times are seconds, by `PERCENTILES`."""

    users: int | None
    rate: float | None
    requests: int
    errors: int
    first_error: str | None
    seconds: float  # from the first request to the last answer
    prompt_tokens: int
    tokens: int
    rounds: int | None
    first_token: list[float]
    inter_token: list[float]
    whole: list[float]
    per_user: float  # tokens/s of an answer, from its request to its end: median
    good: float  # answers a second that met the goal
    cached_tokens: int | None = None  # of the prompts', reused; None: the server does not say
    later_first_token: list[float] = field(default_factory=list)  # of turns after the first
    kept: list[float] = field(default_factory=list)  # as of a `Cell`; [] where the server tells not

    def __str__(self) -> str:
        if self.users is None:
            return f"{self.rate:g} requests/s"
        return in_users(self.users)

    @property
    def total(self) -> float:
        """Tokens/s of the server."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def after_first(self) -> float:
        """Tokens/s of an answer after its first token: median."""
        return 1 / self.inter_token[0] if self.inter_token and self.inter_token[0] else 0.0

    @property
    def tau(self) -> float | None:
        """Tokens committed by a round; the first token of an answer comes from its prompt."""
        if not self.rounds:
            return None
        return (self.tokens - (self.requests - self.errors)) / self.rounds


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    """`bench serve` of a server; machine and versions are the client's."""

    url: str
    protocol: str
    options: Mapping[str, Any]
    levels: list[Level]
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    complete: bool = True
    format: int = 1


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """One load on the server of one method."""

    method: str
    users: int
    prompts: str  # by name
    thinking: str  # "default": the chat template is told nothing
    gpus: int = 0  # of the server; 0: it runs on a CPU
    level: Level | None = None
    error: str | None = None  # why it is not measured, or not whole

    def __str__(self) -> str:
        parts = [self.method, in_users(self.users), self.prompts]
        return ", ".join([*parts, *[f"thinking {self.thinking}"] * (self.thinking != "default")])

    @property
    def per_gpu(self) -> float:
        """Tokens/s of a GPU, of the whole machine where there is none."""
        return self.level.total / max(self.gpus, 1) if self.level else 0.0


@dataclass(frozen=True, kw_only=True)
class MatrixRun:
    """`bench matrix` of a config."""

    name: str
    hub: Mapping[str, str]  # ids there of target and drafter
    options: Mapping[str, Any]
    cells: list[MatrixCell]
    price: float | None  # of the machine for an hour
    complete: bool
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    gpus: list[str] = field(default_factory=list)  # of the machine, by name
    format: int = 1


AnyRun = Run | ServerRun | MatrixRun


def write_run(path: Path, run: AnyRun) -> None:
    path.write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")


def read_run(path: Path) -> AnyRun:
    """RequestError when the file is not a run that `write_run` wrote."""
    try:
        run: AnyRun = read_as(path, AnyRun)  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} is not a result of `dflash-trt bench` ({error})",
            "Give the file that it wrote with --output, of `bench matrix` its matrix.json",
        ) from error
    return run
