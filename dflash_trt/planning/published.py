"""What others measured (`dflash_trt/roofline/published/`), and what the plan would have said."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from dflash_trt.roofline.hardware import machine
from dflash_trt.roofline.methods import PLAIN, Method, dflash, eagle, tokens_per_second
from dflash_trt.roofline.passes import Constants, Layout, Runtime, Software
from dflash_trt.roofline.published import data, tau_of
from dflash_trt.roofline.shape import Shape, drafter_shape, target_shape


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    source: str
    use: Literal["calibrate", "check"]
    machine: str
    layout: Layout
    software: Software
    target: str
    task: str
    method: Method
    context: int
    concurrency: tuple[int, ...]  # of more than one, a mean
    unit: Literal["tokens", "times"]  # tokens/s in all, or times as fast as plain
    value: float
    at_least: bool  # "more than" was published


@cache
def target(name: str) -> Shape:
    return target_shape(data()["models"][name])


def drafting(name: str, of: str, acceptance: float, draft_tokens: int | None = None) -> Method:
    """DFlash by a published drafter; draft_tokens: its whole block unless given."""
    config = data()["drafters"][name]["config"]
    drafts = draft_tokens or config["block_size"] - 1
    return dflash(drafter_shape(config, target(of)), acceptance, drafts)


def figures() -> Iterator[Figure]:
    for group in data()["figures"]:
        for name in ("plain", "EAGLE-3", "DFlash"):
            measured = group.get(name) or {}
            for unit in ("tokens", "times"):
                yield from _figures(group, name, unit, measured)


def _figures(
    group: Mapping[str, Any], name: str, unit: Any, measured: Mapping[str, Any]
) -> Iterator[Figure]:
    levels = [(n,) for n in group["concurrency"]]
    if group.get("mean"):
        levels = [tuple(group["concurrency"])]
    if unit not in measured:
        return
    for level, value in zip(levels, measured[unit], strict=True):
        yield Figure(
            source=group["source"],
            use=group["use"],
            machine=group["machine"],
            layout=Layout(group["gpus"], *([True, True] if group.get("attention_dp") else [])),
            software=group["software"],
            target=group["target"],
            task=group["task"],
            method=_method(group, name, measured),
            context=group.get("context", data()["context"]),
            concurrency=level,
            unit=unit,
            value=value,
            at_least=group.get("at_least", False),
        )


def _method(group: Mapping[str, Any], name: str, measured: Mapping[str, Any]) -> Method:
    if name == "plain":
        return PLAIN
    if name == "EAGLE-3":
        return eagle(target(group["target"]), measured["tau"], measured["drafts"])
    return drafting(group["drafter"], group["target"], tau_of(group), measured.get("drafts"))


def predict(figure: Figure, constants: Constants) -> float:
    """The same number by the plan."""
    runtime = Runtime(machine(figure.machine).gpu, figure.layout, constants, figure.software)
    shape = target(figure.target)

    def rate(method: Method, rows: int) -> float:
        return rows * tokens_per_second(shape, method, runtime, rows, figure.context)

    found = [rate(figure.method, rows) for rows in figure.concurrency]
    if figure.unit == "times":
        plain = [rate(PLAIN, rows) for rows in figure.concurrency]
        found = [a / b for a, b in zip(found, plain, strict=True)]
    return math.exp(sum(map(math.log, found)) / len(found))


def errors(constants: Constants, use: str) -> list[float]:
    """predicted / measured - 1 of each figure that is not merely a bound."""
    return [
        predict(figure, constants) / figure.value - 1
        for figure in figures()
        if figure.use == use and not figure.at_least
    ]
