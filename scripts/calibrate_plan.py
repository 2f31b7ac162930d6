"""Fit the plan's constants to published figures, and write what they explain into the docs.

    python scripts/calibrate_plan.py           constants.yaml, then as with --docs
    python scripts/calibrate_plan.py --docs    the tables and the picture of docs/planning.md

Seven numbers are fitted, to the figures marked `use: calibrate`: the squares of ln(predicted /
measured) are made small by Gauss-Newton steps over the numbers' logarithms. One is taken, not
fitted: the seconds of a small all-reduce, for which no figure tells it from small kernels.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from dflash_trt.config import BuildConfig
from dflash_trt.planning import draw, plan
from dflash_trt.planning.curves import Deployment, Point, curve, front
from dflash_trt.roofline import (
    PLAIN,
    Constants,
    Layout,
    Method,
    ModelSize,
    Runtime,
    dflash,
    drafter_size,
    eagle,
    expected_eagle,
    machine,
    published_data,
    round_time,
    target_size,
    tau_of,
)

ROOT = Path(__file__).parents[1]
CONSTANTS = ROOT / "dflash_trt" / "roofline" / "constants.yaml"
DOCS = ROOT / "docs" / "planning.md"
PICTURE = DOCS.with_suffix(".svg")
BEGIN, END = "<!-- by scripts/calibrate_plan.py: -->\n", "<!-- end -->\n"
ALL_REDUCE = 6e-6  # seconds, taken: one-shot, fused with the norm, eight GPUs
START = Constants(
    bandwidth=0.8,
    flops=0.4,
    expert_flops=0.1,
    kernel={"sglang": 5e-6, "tensorrt_llm": 4e-6},
    host={"sglang": 1e-3, "tensorrt_llm": 1e-3},
    all_reduce=ALL_REDUCE,
)
FITTED = 7


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
        """calibrate or check."""
        return str(self.group["use"])

    @property
    def at_least(self) -> bool:
        """ "More than" was published."""
        return bool(self.group.get("at_least"))

    @property
    def layout(self) -> Layout:
        spread = bool(self.group.get("attention_dp"))
        return Layout(self.group["gpus"], attention_dp=spread, experts_parallel=spread)


@cache
def target(name: str) -> ModelSize:
    return target_size(published_data()["models"][name])


def drafting(name: str, of: str, acceptance: float, draft_tokens: int | None = None) -> Method:
    """DFlash by a published drafter; draft_tokens: its whole block unless given."""
    config = published_data()["drafters"][name]["config"]
    drafts = draft_tokens or config["block_size"] - 1
    return dflash(drafter_size(config, target(of)), acceptance, drafts)


def figures() -> Iterator[Figure]:
    for group in published_data()["figures"]:
        levels = [(n,) for n in group["concurrency"]]
        if group.get("mean"):
            levels = [tuple(group["concurrency"])]
        for name in ("plain", "EAGLE-3", "DFlash"):
            measured = group.get(name) or {}
            for unit in ("tokens", "times"):
                for level, value in zip(levels, measured.get(unit, ()), strict=unit in measured):
                    yield Figure(group, _method(group, name, measured), level, unit, value)


def _method(group: Mapping[str, Any], name: str, measured: Mapping[str, Any]) -> Method:
    if name == "plain":
        return PLAIN
    if name == "EAGLE-3":
        return eagle(target(group["target"]), measured["tau"], measured["drafts"])
    return drafting(group["drafter"], group["target"], tau_of(group), measured.get("drafts"))


def predict(figure: Figure, constants: Constants) -> float:
    """The same number by the plan."""
    group, size = figure.group, target(figure.group["target"])
    gpu = machine(group["machine"]).gpu
    runtime = Runtime(gpu, figure.layout, constants, group["software"])
    context = group.get("context", published_data()["context"])

    def rate(method: Method, rows: int) -> float:
        return rows * method.acceptance / round_time(size, method, runtime, rows, context).seconds

    found = [rate(figure.method, rows) for rows in figure.concurrency]
    if figure.unit == "times":
        plain = [rate(PLAIN, rows) for rows in figure.concurrency]
        found = [a / b for a, b in zip(found, plain, strict=True)]
    return geometric_mean(found)


def errors(constants: Constants, use: str) -> list[float]:
    """predicted / measured - 1 of each figure that is not merely a bound."""
    return [
        predict(figure, constants) / figure.value - 1
        for figure in figures()
        if figure.use == use and not figure.at_least
    ]


def per_gpu_at(points: Sequence[Point], per_user: float) -> float | None:
    """tokens/s of a GPU where each user gets `per_user`, along the front; None where it ends."""
    for slow, fast in pairwise(front(points)):
        if slow.per_user <= per_user <= fast.per_user:
            share = (per_user - slow.per_user) / (fast.per_user - slow.per_user)
            return math.exp((1 - share) * math.log(slow.per_gpu) + share * math.log(fast.per_gpu))
    return None


def numbers(constants: Constants) -> np.ndarray:
    """What is fitted, as logarithms."""
    kernel, host = constants.kernel, constants.host
    shares = (constants.bandwidth, constants.flops, constants.expert_flops)
    seconds = (kernel["sglang"], kernel["tensorrt_llm"], host["sglang"], host["tensorrt_llm"])
    return np.log([*shares, *seconds])


def constants(logarithms: np.ndarray) -> Constants:
    bandwidth, flops, expert_flops, k0, k1, h0, h1 = map(float, np.exp(logarithms))
    return Constants(
        bandwidth=bandwidth,
        flops=flops,
        expert_flops=expert_flops,
        kernel={"sglang": k0, "tensorrt_llm": k1},
        host={"sglang": h0, "tensorrt_llm": h1},
        all_reduce=ALL_REDUCE,
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


def write_constants(found: Constants) -> None:
    rounded = {
        name: {key: _round(x) for key, x in value.items()}
        if isinstance(value, dict)
        else _round(value)
        for name, value in asdict(found).items()
    }
    off = sorted(abs(math.log1p(error)) for error in errors(Constants(**rounded), "check"))
    tenths = quantiles(off, n=10)
    spread = {"checked": len(off), "median": _round(tenths[4]), "nine_of_ten": _round(tenths[8])}
    text = yaml.safe_dump({"constants": rounded, "errors": spread}, sort_keys=False)
    CONSTANTS.write_text(
        "# Written by scripts/calibrate_plan.py. Shares of a data sheet's figure, and seconds.\n"
        "# errors: |ln(predicted / measured)| of the figures that were not fitted.\n" + text
    )


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def document(text: str) -> str:
    """docs/planning.md with its tables written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


def picture() -> str:
    """The plan of gpt-oss-120b on a DGX B300."""
    pair = published_data()["pareto"]
    drafter = pair["drafter"]
    config = BuildConfig(
        name="picture",
        target={"hub": f"openai/{pair['target']}", "revision": "main"},
        drafter={"hub": drafter, "revision": "main"},
        engine={"kind": "tensorrt_llm", "hardware": pair["machine"]},
    )
    values = {"target": published_data()["models"][pair["target"]]}
    values["drafter"] = published_data()["drafters"][drafter]["config"]
    with TemporaryDirectory() as directory:
        places = {role: Path(directory, role) for role in values}
        for role, place in places.items():
            place.mkdir()
            (place / "config.json").write_text(json.dumps(values[role]))
        return draw(plan(config, **places))


def tables() -> str:
    known = Constants.fitted()
    lines = ["", "| constant | fitted | |", "|---|---|---|"]
    lines += [
        f"| memory bandwidth reached | {known.bandwidth:.0%} | of the data sheet's |",
        f"| arithmetic reached | {known.flops:.0%} | of the dense FLOP/s |",
        f"| arithmetic reached by experts | {known.expert_flops:.1%} | of the dense FLOP/s |",
    ]
    for software, name in (("sglang", "SGLang"), ("tensorrt_llm", "TensorRT-LLM")):
        lines.append(f"| a small kernel, {name} | {known.kernel[software] * 1e6:.1f} us | |")
        lines.append(f"| host, speculative round, {name} | {known.host[software] * 1e3:.2f} ms | |")
    lines.append(f"| a small all-reduce | {known.all_reduce * 1e6:.0f} us | taken, not fitted |")
    rows = [(figure, predict(figure, known)) for figure in figures()]
    lines += ["", *_summary(rows), ""]
    source = None
    for figure, predicted in rows:
        if figure.group["source"] != source:
            source = figure.group["source"]
            lines += ["", f"**{source}**, {figure.group['machine']}", ""]
            lines += [
                "| target | task | method | tau | sequences | measured | predicted | error | |"
            ]
            lines += ["|---|---|---|---|---|---|---|---|---|"]
        lines.append(_row(figure, predicted))
    return "\n".join([*lines, "", *_pareto(known), ""])


def _summary(rows: list[tuple[Figure, float]]) -> list[str]:
    lines = ["| figures | how many | median | 9 of 10 within | worst |", "|---|---|---|---|---|"]
    kinds = {
        "fitted": lambda f: f.use == "calibrate",
        "only checked": lambda f: f.use == "check",
        "- of them plain decoding": lambda f: f.use == "check" and f.method.name == "plain",
        "- of them DFlash": lambda f: f.use == "check" and f.method.name == "DFlash",
        "- of them EAGLE-3": lambda f: f.use == "check" and f.method.name == "EAGLE-3",
    }
    for name, chosen in kinds.items():
        off = sorted(abs(p / f.value - 1) for f, p in rows if chosen(f) and not f.at_least)
        tenths = quantiles(off, n=10)
        lines.append(f"| {name} | {len(off)} | {tenths[4]:.0%} | {tenths[8]:.0%} | {off[-1]:.0%} |")
    return lines


def _row(figure: Figure, predicted: float) -> str:
    def show(value: float) -> str:
        return f"{value:.2f}x" if figure.unit == "times" else f"{value:,.0f} tok/s"

    many = len(figure.concurrency) > 1
    level = (
        f"{figure.concurrency[0]}-{figure.concurrency[-1]}, mean" if many else figure.concurrency[0]
    )
    measured = ("> " if figure.at_least else "") + show(figure.value)
    holds = figure.at_least and predicted > figure.value
    error = "holds" if holds else f"{predicted / figure.value - 1:+.0%}"
    method = figure.method.name + (f" ({figure.layout})" if figure.layout.gpus > 1 else "")
    tau = f"{figure.method.acceptance:.2f}" if figure.method.drafter else ""
    fitted = "fitted" if figure.use == "calibrate" else ""
    cells = (
        figure.group["target"],
        figure.group["task"],
        method,
        tau,
        level,
        measured,
        show(predicted),
        error,
        fitted,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _pareto(known: Constants) -> list[str]:
    found = published_data()["pareto"]
    shape, context = target(found["target"]), published_data()["context"]
    ours = drafting(found["drafter"], found["target"], tau_of(found))
    assert ours.drafter is not None
    deployment = Deployment(
        machine(found["machine"]), 8, shape, ours.drafter, ours.draft_tokens + 1
    )
    curves = {
        method.name: curve(deployment, method, context, known)
        for method in (PLAIN, eagle(shape, expected_eagle("openai/gpt-oss-120b")[0]), ours)
    }
    fastest = max(point.per_user for point in curves["plain"])
    lines = [f"**{found['source']}**: tokens/s of a GPU, DFlash over the other at equal speed", ""]
    lines += ["| tokens/s of each user | over | published | predicted |", "|---|---|---|---|"]
    for users in (math.floor(fastest), *found["users"]):
        for other in ("plain", "EAGLE-3"):
            mine, theirs = (per_gpu_at(curves[name], users) for name in ("DFlash", other))
            shown = f"{mine / theirs:.1f}x" if mine and theirs else "it never gets there"
            stated = f"{'> ' if other == 'plain' else ''}{found[other]}x"
            lines.append(
                f"| {users} | {other} | {stated if users in found['users'] else ''} | {shown} |"
            )
    return lines


if __name__ == "__main__":
    if "--docs" not in sys.argv:
        write_constants(fit(START))
        Constants.fitted.cache_clear()
    DOCS.write_text(document(DOCS.read_text("utf-8")), "utf-8")
    PICTURE.write_text(picture(), "utf-8")
