"""`dflash-trt bench matrix`: methods, users and prompts, each measured over a server of its method.

A cell is a file, written whole or not at all, so that an interrupted run goes on where it was.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, get_args

from dflash_trt.atomic import replace_text
from dflash_trt.bench.launched import can_launch, launched
from dflash_trt.bench.load import Goal, Load, measure_server
from dflash_trt.bench.matrix_report import matrix_page
from dflash_trt.bench.page import write_page
from dflash_trt.bench.prompts import load_asked
from dflash_trt.bench.protocols import Ask
from dflash_trt.bench.results import Level, MatrixCell, MatrixRun, write_run
from dflash_trt.chat import as_chat, load_chat_template
from dflash_trt.config import BuildConfig, Method, OnnxRuntime, TensorRTLLM, variants
from dflash_trt.errors import ConfigError, DflashError, RequestError
from dflash_trt.files import read_as
from dflash_trt.machine import cpu_model
from dflash_trt.prompts import Prompt
from dflash_trt.serving.server import LOOPBACK, running_server
from dflash_trt.tensorrt_llm import KIND, check_host, gpus, read_info

WARM_UP_TOKENS = 16
METHODS = get_args(Method)
# what a chat template is told; default: nothing
THINKING: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "off": {"enable_thinking": False},
    "on": {"enable_thinking": True},
    **{effort: {"reasoning_effort": effort} for effort in ("low", "medium", "high")},
}
Report = Callable[[str, int, int], None]


def variant(config: BuildConfig, method: str) -> BuildConfig:
    """The config that runs this method; ConfigError where it cannot."""
    found = {str(name): made for name, made in variants(config).items()}
    if method not in found:
        raise ConfigError(
            f"{config.name} has no method {method}",
            f"Take {', '.join(found)}, or name its drafter under drafters",
        )
    return found[method]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What to measure: every combination of the lists."""

    config: BuildConfig
    methods: tuple[str, ...]
    users: tuple[int, ...]  # at once
    prompts: Mapping[str, Sequence[Prompt]]  # by name
    thinking: tuple[str, ...]  # of `THINKING`; a text that is no message is asked once
    requests: int  # of a cell, or twice its users if that is more
    max_tokens: int
    goal: Goal
    machine: list[str] = field(default_factory=lambda: [cpu_model(), *(gpu.name for gpu in gpus())])

    def cells(self, method: str) -> list[MatrixCell]:
        """Those of a method, not yet measured."""
        return [
            MatrixCell(method=method, users=users, prompts=name, thinking=thinking)
            for users, (name, prompts) in product(self.users, self.prompts.items())
            for thinking in (["default"] if isinstance(prompts[0], str) else self.thinking)
        ]

    def file(self, cell: MatrixCell) -> str:
        """Its name; of another config, machine, prompts or options it is another."""
        name = "-".join((cell.method, str(cell.users), cell.prompts, cell.thinking))
        facts = (
            *(self.fitted.model_dump_json(), name, self.prompts[cell.prompts], self.machine),
            *(self.requests, self.max_tokens, asdict(self.goal)),
        )
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return f"{re.sub(r'[^a-zA-Z0-9.-]+', '_', name)}-{digest[:12]}.json"

    @property
    def fitted(self) -> BuildConfig:
        """The config for as many sequences at once as there are users."""
        config, most = self.config, max(self.users)
        if isinstance(engine := config.engine, TensorRTLLM):
            places = "link" if engine.checkpoints == "copy" else engine.checkpoints
            update = {"concurrency": max(engine.concurrency or 0, most), "checkpoints": places}
            return config.model_copy(update={"engine": engine.model_copy(update=update)})
        serving = config.serving.model_copy(update={"slots": max(config.serving.slots, most)})
        return config.model_copy(update={"serving": serving})


def read_prompt_sets(names: Sequence[str], count: int) -> dict[str, list[Prompt]]:
    """At most `count` prompts of each by a short name; RequestError for what is none."""
    labels = [Path(name).name for name in names]
    if len({*labels}) < len(labels):
        labels = [*names]
    return {label: load_asked(name, count) for label, name in zip(labels, names, strict=True)}


def run_matrix(
    matrix: Matrix,
    directory: Path,
    options: Mapping[str, Any],
    price: float | None,
    report: Report,
) -> MatrixRun:
    """Measure what `directory` does not hold, and keep matrix.json and the report true to it.

    A cell that failed has its reason; it is tried again the next time. An interrupt ends it with
    what there is. price: of the machine for an hour. OSError for `directory`.
    """
    folder = directory / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {method: matrix.cells(method) for method in matrix.methods}
    files = [matrix.file(cell) for cells in wanted.values() for cell in cells]
    found = {file: cell for file in files if (cell := _read(folder / file)) is not None}

    def publish(*, complete: bool) -> MatrixRun:
        config = matrix.config
        run = MatrixRun(
            name=config.name,
            hub={
                "target": config.target.hub or "",
                "drafter": (config.drafter and config.drafter.hub) or "",
            },
            options=options,
            cells=[found[file] for file in files if file in found],
            price=price,
            complete=complete,
            gpus=matrix.machine[1:],
        )
        write_run(directory / "matrix.json", run)
        write_page(directory, matrix_page(run))
        return run

    def take(cell: MatrixCell) -> None:
        file = matrix.file(cell)
        replace_text(folder / file, json.dumps(asdict(cell), indent=1) + "\n")
        found[file] = cell
        publish(complete=False)

    try:
        with asyncio.Runner() as runner:  # gRPC goes on telling a loop that was closed
            for method, cells in wanted.items():
                done = {file for file, cell in found.items() if cell.error is None}
                if left := [cell for cell in cells if matrix.file(cell) not in done]:
                    built = directory / "builds" / method
                    _measure_method(matrix, left, built, runner, report, take)
    except KeyboardInterrupt:
        return publish(complete=False)
    return publish(complete=True)


def _read(file: Path) -> MatrixCell | None:
    try:
        return read_as(file, MatrixCell)
    except (OSError, ValueError):
        return None


def _measure_method(
    matrix: Matrix,
    cells: Sequence[MatrixCell],
    built: Path,
    runner: asyncio.Runner,
    report: Report,
    take: Callable[[MatrixCell], None],
) -> None:
    """Build, serve and measure; after a cell that failed, over a new server."""
    left = [*cells]
    try:
        config = variant(matrix.fitted, left[0].method)
        from dflash_trt.build.run import build  # noqa: PLC0415  (a server's image has no builder)

        build(config, built, report)
        gpu_count = _gpus(built, config)
        refused = _refused(built / "tokenizer", {cell.thinking for cell in left})
        for cell in [cell for cell in left if cell.thinking in refused]:
            left.remove(cell)
            take(replace(cell, error=refused[cell.thinking]))
        while left:
            by_mpi = isinstance(config.engine, TensorRTLLM) and can_launch()
            with launched(built) if by_mpi else running_server(built) as ports:
                failed = False
                while left and not failed:
                    url = f"{LOOPBACK}:{ports.grpc}"
                    cell = replace(left[0], gpus=gpu_count)
                    cell = _measured(matrix, cell, url, runner, report)
                    failed = cell.error is not None
                    left.pop(0)
                    take(cell)
    except DflashError as error:
        for cell in left:
            take(replace(cell, error=str(error)))


def _gpus(built: Path, config: BuildConfig) -> int:
    """How many the build takes, 0 where it takes none; EngineError if it cannot run here."""
    engine = config.engine
    if isinstance(engine, TensorRTLLM):
        info = read_info(built / "engines" / KIND)
        check_host(info)
        return info.gpus * info.nodes
    on_cpu = isinstance(engine, OnnxRuntime) and engine.device == "cpu"
    return 0 if on_cpu else engine.tensor_parallel_size


def _refused(tokenizer: Path, asked: set[str]) -> dict[str, str]:
    """Of ways to think, those that change nothing of what the chat template writes, and why."""
    render = load_chat_template(tokenizer)

    def written(thinking: str) -> str | None:
        try:
            values = THINKING[thinking]
            return render and render(messages=as_chat("x"), add_generation_prompt=True, **values)
        except RequestError as error:
            return str(error)

    others = {"on": "off", "off": "on", "low": "high", "medium": "high", "high": "low"}
    return {
        thinking: f"the chat template has no {next(iter(THINKING[thinking]))}"
        for thinking in asked & others.keys()
        if written(thinking) == written(others[thinking])
    }


def _measured(
    matrix: Matrix,
    cell: MatrixCell,
    url: str,
    runner: asyncio.Runner,
    report: Report,
) -> MatrixCell:
    """The cell with its level; no prompt finds an earlier one's KV cache."""
    count = max(matrix.requests, 2 * cell.users)
    salt = matrix.file(cell)
    asks = [
        Ask(
            *(prompt, matrix.max_tokens, 0.0, i, THINKING[cell.thinking]),
            {"cache_salt": f"{salt} {i}"},
        )
        for i, prompt in enumerate(islice(cycle(matrix.prompts[cell.prompts]), count))
    ]
    warm_up = [
        replace(
            ask,
            max_tokens=min(ask.max_tokens, WARM_UP_TOKENS),
            more={"cache_salt": f"{salt} warm-up"},
        )
        for ask in asks[: cell.users]
    ]
    levels: list[Level] = []
    load = Load(users=cell.users)
    told = partial(report, str(cell))
    try:
        runner.run(
            measure_server(
                *("triton-grpc", url, None, [load], asks, count, matrix.goal, told, levels),
                warm_up=warm_up,
            )
        )
    except DflashError as error:
        return replace(cell, error=str(error))
    level = levels[0]
    if level.errors:
        failed = f"{level.errors} of {level.requests} requests failed: {level.first_error}"
        return replace(cell, level=level, error=failed)
    return replace(cell, level=level)
