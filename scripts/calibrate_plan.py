"""Fit the plan's constants to published figures, and print how far each figure is off.

    python scripts/calibrate_plan.py           writes constants.yaml, then prints
    python scripts/calibrate_plan.py --show    only prints

Eight numbers are fitted, to the figures marked `use: calibrate`: the squares of ln(predicted /
measured) are made small by Gauss-Newton steps over the numbers' logarithms. Two are taken, not
fitted: the seconds of a small all-reduce, for which no figure tells it from small kernels, and of
one in two shots. Of engine kind `pytorch` a small kernel's seconds are those with which the first
figure marked `use: one_gpu` is met, and the host's are measured (`scripts/host_part.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import numpy as np
import yaml

from dflash_trt.hardware import find_machine
from dflash_trt.planning import (
    PLAIN,
    Constants,
    Layout,
    Method,
    ModelSize,
    Runtime,
    dflash,
    drafter_size,
    published_data,
    published_models,
    round_time,
    target_size,
)
from dflash_trt.planning.published import acceptance_tables

CONSTANTS = Path(__file__).parents[1] / "dflash_trt" / "planning" / "constants.yaml"
ALL_REDUCE = 6e-6  # seconds, taken: one-shot, fused with the norm, eight GPUs
TWO_SHOTS = 25e-6  # seconds, taken: NCCL's for a few kilobytes, eight GPUs
START = Constants(
    bandwidth=0.8,
    flops=0.4,
    expert_flops=0.1,
    kernel={"sglang": 5e-6, "tensorrt_llm": 4e-6},
    host={"sglang": 1e-3, "tensorrt_llm": 1e-3},
    all_reduce=ALL_REDUCE,
    one_shot=0.2,
    two_shots=TWO_SHOTS,
)
FITTED = 8
HOST = 1.3e-4  # seconds, measured: one stream's round of 15 drafts, engines that compute nothing


@dataclass(frozen=True)
class Figure:
    """One measured number; group: its entry in published.yaml."""

    group: Mapping[str, Any]
    method: Method
    concurrency: tuple[int, ...]  # of more than one, a mean
    unit: str  # tokens: tokens/s in all; times: times as fast as plain
    value: float

    @property
    def use(self) -> str:
        return str(self.group["use"])

    @property
    def at_least(self) -> bool:
        """Whether "more than" was published."""
        return bool(self.group.get("at_least"))

    @property
    def layout(self) -> Layout:
        spread = bool(self.group.get("attention_dp"))
        return Layout(self.group["gpus"], attention_dp=spread, experts_parallel=spread)


@cache
def target(name: str) -> ModelSize:
    targets = published_models()["targets"].items()
    return target_size(next(config for hub, config in targets if hub.split("/")[1] == name))


def drafting(name: str, of: str, acceptance: float, draft_tokens: int | None = None) -> Method:
    """Return DFlash by a published drafter; draft_tokens: by default its whole block."""
    config = published_models()["drafters"][name]["config"]
    config = {**config, **config["dflash_config"]}
    drafts = draft_tokens or config["block_size"] - 1
    return dflash(drafter_size(config, target(of)), acceptance, drafts)


def figures() -> Iterator[Figure]:
    for group in published_data()["figures"]:
        levels = [(n,) for n in group["concurrency"]]
        if group.get("mean"):
            levels = [tuple(group["concurrency"])]
        for name in ("plain", "DFlash"):
            measured = group.get(name) or {}
            for unit in ("tokens", "times"):
                for level, value in zip(levels, measured.get(unit, ()), strict=unit in measured):
                    yield Figure(group, _method(group, name, measured), level, unit, value)


def _method(group: Mapping[str, Any], name: str, measured: Mapping[str, Any]) -> Method:
    if name == "plain":
        return PLAIN
    return drafting(group["drafter"], group["target"], tau_of(group), measured.get("drafts"))


def tau_of(group: Mapping[str, Any]) -> float:
    """Return tau from the table that an entry of `figures` names."""
    block = published_models()["drafters"][group["drafter"]]["config"]["block_size"]
    drafts = group.get("DFlash", {}).get("drafts", block - 1)
    named = (group.get("acceptance", ""), group["drafter"], drafts)
    tables = {(x.name, x.drafter, x.draft_tokens): x.tau for x in acceptance_tables()}
    return tables[named][group.get("tau_of", group["task"])]


def predict(figure: Figure, constants: Constants) -> float:
    """Return the plan's prediction of the figure."""
    group, size = figure.group, target(figure.group["target"])
    gpu = find_machine(group["machine"]).gpu
    runtime = Runtime(gpu, figure.layout, constants, group["software"])
    context = group.get("context", published_data()["context"])

    def rate(method: Method, rows: int) -> float:
        return rows * method.acceptance / round_time(size, method, runtime, rows, context).seconds

    rates = [rate(figure.method, rows) for rows in figure.concurrency]
    if figure.unit == "times":
        plain = [rate(PLAIN, rows) for rows in figure.concurrency]
        rates = [a / b for a, b in zip(rates, plain, strict=True)]
    return geometric_mean(rates)


def errors(constants: Constants, use: str) -> list[float]:
    """Return predicted / measured - 1 of each figure that is not merely a bound."""
    return [
        predict(figure, constants) / figure.value - 1
        for figure in figures()
        if figure.use == use and not figure.at_least
    ]


def numbers(constants: Constants) -> np.ndarray:
    """Return the fitted constants as logarithms."""
    kernel, host = constants.kernel, constants.host
    shares = (constants.bandwidth, constants.flops, constants.expert_flops, constants.one_shot)
    seconds = (kernel["sglang"], kernel["tensorrt_llm"], host["sglang"], host["tensorrt_llm"])
    return np.log([*shares, *seconds])


def constants(logarithms: np.ndarray) -> Constants:
    bandwidth, flops, expert_flops, one_shot, k0, k1, h0, h1 = map(float, np.exp(logarithms))
    return Constants(
        bandwidth=bandwidth,
        flops=flops,
        expert_flops=expert_flops,
        kernel={"sglang": k0, "tensorrt_llm": k1},
        host={"sglang": h0, "tensorrt_llm": h1},
        all_reduce=ALL_REDUCE,
        one_shot=one_shot,
        two_shots=TWO_SHOTS,
    )


def residuals(logarithms: np.ndarray) -> np.ndarray:
    return np.log1p(errors(constants(logarithms), "calibrate"))


def fit(start: Constants, steps: int = 40) -> Constants:
    at, damping = numbers(start), 1e-3
    for _ in range(steps):
        here = residuals(at)
        moved = [residuals(at + 1e-4 * one) for one in np.eye(FITTED)]
        slope = (np.array(moved) - here).T / 1e-4
        step = np.linalg.solve(slope.T @ slope + damping * np.eye(FITTED), -slope.T @ here)
        step = np.clip(step, -0.5, 0.5)
        better = (residuals(at + step) ** 2).sum() < (here**2).sum()
        at, damping = (at + step, damping / 3) if better else (at, damping * 4)
    return constants(at)


def write_constants(constants: Constants) -> None:
    rounded = {
        name: {key: _round(x) for key, x in value.items()}
        if isinstance(value, dict)
        else _round(value)
        for name, value in asdict(constants).items()
    }
    off = sorted(abs(math.log1p(error)) for error in errors(Constants(**rounded), "check"))
    tenths = quantiles(off, n=10)
    spread = {"checked": len(off), "median": _round(tenths[4]), "nine_of_ten": _round(tenths[8])}
    text = yaml.safe_dump({"constants": rounded, "errors": spread}, sort_keys=False)
    CONSTANTS.write_text(
        "# Written by scripts/calibrate_plan.py. Shares of a data sheet's figure, and seconds.\n"
        "# errors: |ln(predicted / measured)| of the figures that were not fitted.\n" + text
    )


def with_one_gpu(fitted: Constants) -> Constants:
    """Add what engine kind `pytorch` takes of a kernel and of the host."""
    figure = next(each for each in figures() if each.use == "one_gpu")
    times = [1 / predict(figure, _with_kernel(fitted, kernel)) for kernel in (0.0, 1e-6)]
    kernels = (times[1] - times[0]) / 1e-6
    return _with_kernel(fitted, (1 / figure.value - times[0]) / kernels)


def _with_kernel(fitted: Constants, kernel: float) -> Constants:
    return replace(
        fitted,
        kernel={**fitted.kernel, "pytorch": kernel},
        host={**fitted.host, "pytorch": HOST},
    )


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def show() -> None:
    """Print each figure with its prediction, then the median error by method."""
    known, off = Constants.fitted(), dict[str, list[float]]()
    for figure in figures():
        predicted = predict(figure, known)
        error = predicted / figure.value - 1
        group = figure.group
        words = (*(group[name] for name in ("source", "target", "task")), figure.method.name)
        value = f"{'at least ' * figure.at_least}{figure.value:g} {figure.unit}"
        print(*words, figure.concurrency, value, f"{predicted:.3g}", f"{error:+.0%}", sep=" | ")
        if not figure.at_least:
            off.setdefault(f"{figure.use}, {figure.method.name}", []).append(abs(error))
    for name, values in off.items():
        print(
            f"{name}: {len(values)} figures, median {median(values):.0%}, worst {max(values):.0%}"
        )


if __name__ == "__main__":
    if "--show" not in sys.argv:
        write_constants(with_one_gpu(fit(START)))
        Constants.fitted.cache_clear()
    show()
