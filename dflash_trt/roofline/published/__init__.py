"""What others measured of DFlash pairs: `data.yaml`, with a source for every number.

The figures are theirs, by their hardware and software. They are shown beside our own measurements
and never mixed with them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from dflash_trt.roofline.hardware import machine

SOFTWARE = {"sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One published table of one drafter; by task."""

    name: str
    source: str
    hardware: str  # and software
    drafter: str  # its id on the Hub
    draft_tokens: int  # of a round
    tau: Mapping[str, float]  # tokens that a round commits, the target's own included
    times: Mapping[str, float] = field(default_factory=dict)  # plain decoding, one sequence
    setting: str = ""
    temperature: float | None = None  # None: not said


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement of DFlash, as a table shows it."""

    source: str
    hardware: str
    task: str
    draft_tokens: int | None  # of a round; None: not said
    sequences: str  # at a time, with commas, as `speedup` has them
    speedup: str
    tau: float | None  # None: not said


@cache
def data() -> Mapping[str, Any]:
    found = files(__package__).joinpath("data.yaml").read_text("utf-8")
    return yaml.safe_load(found)  # type: ignore[no-any-return]


@cache
def tables() -> tuple[Acceptance, ...]:
    return tuple(Acceptance(**entry) for entry in data()["acceptance"])


def acceptance(drafter: str, draft_tokens: int | None = None) -> Acceptance | None:
    """The table to hold a drafter against: with so many draft tokens, or with its most.

    drafter: its id on the Hub, or its name alone, which a directory may have.
    """
    found = [each for each in tables() if drafter in (each.drafter, each.drafter.split("/")[1])]
    wanted = draft_tokens or max((each.draft_tokens for each in found), default=0)
    return next((each for each in found if each.draft_tokens == wanted), None)


def tau_of(entry: Mapping[str, Any]) -> float:
    """Of an entry of `figures` or `pareto`, by the table that it names."""
    wanted = (entry["acceptance"], entry["drafter"], _draft_tokens(entry))
    found = [each for each in tables() if _key(each) == wanted]
    return found[0].tau[entry.get("tau_of", entry["task"])]


def rows(target: str, drafter: str) -> list[Row]:
    """All that is published of a pair, by the ids on the Hub; none of one that is not there."""
    if data()["drafters"].get(drafter, {}).get("target") != target:
        return []
    return [*_figures(drafter), *_tables(drafter)]


def _figures(drafter: str) -> Iterator[Row]:
    for entry in data()["figures"]:
        measured = entry.get("DFlash")
        if entry.get("drafter") != drafter or not measured:
            continue
        speedups = measured.get("times") or [
            round(ours / plain, 1)
            for ours, plain in zip(measured["tokens"], entry["plain"]["tokens"], strict=True)
        ]
        gpus = f"{entry['gpus']} x {machine(entry['machine']).gpu.name}"
        levels = ["not said"] if entry.get("mean") else map(str, entry["concurrency"])
        more = "more than " if entry.get("at_least") else ""
        yield Row(
            source=entry["source"],
            hardware=entry.get("hardware", f"{gpus}, {SOFTWARE[entry['software']]}"),
            task=entry["task"],
            draft_tokens=None if "tau_of" in entry else _draft_tokens(entry),
            sequences=", ".join(levels),
            speedup=", ".join(f"{more}{value}" for value in speedups),
            tau=None if "tau_of" in entry else tau_of(entry),
        )


def _tables(drafter: str) -> Iterator[Row]:
    """What has no speeds among the figures."""
    known = {
        (entry.get("acceptance"), entry.get("drafter"), _draft_tokens(entry), entry["task"])
        for entry in data()["figures"]
        if entry.get("DFlash")
    }
    for table in tables():
        if table.drafter != drafter:
            continue
        temperature = "" if table.temperature is None else f"temperature {table.temperature:g}"
        for task, tau in table.tau.items():
            if (*_key(table), task) not in known:
                times = table.times.get(task)
                yield Row(
                    source=", ".join(filter(None, (table.source, temperature, table.setting))),
                    hardware=table.hardware,
                    task=task,
                    draft_tokens=table.draft_tokens,
                    sequences="1" if times else "",
                    speedup=f"{times:.2f}" if times else "",
                    tau=tau,
                )


def _key(table: Acceptance) -> tuple[str, str, int]:
    return (table.name, table.drafter, table.draft_tokens)


def _draft_tokens(entry: Mapping[str, Any]) -> int:
    """The whole block unless said."""
    whole = data()["drafters"][entry["drafter"]]["config"]["block_size"] - 1
    return int(entry.get("DFlash", {}).get("drafts", whole))
