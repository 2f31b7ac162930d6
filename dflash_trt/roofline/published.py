"""What others measured of DFlash pairs: `published.yaml`, with a source for every number.

The figures are theirs, by their hardware and software. They are shown beside our own measurements
and never mixed with them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dflash_trt.files import data_file
from dflash_trt.roofline.hardware import machine

NEAR = 0.8  # of the lowest acceptance length of another engine: texts differ
SOFTWARE = {"sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
Row = dict[str, str]  # one published measurement of DFlash, as a table shows it


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One published table of one drafter, by task."""

    name: str
    source: str
    hardware: str  # and software
    drafter: str  # its id on the Hub
    draft_tokens: int  # of a round
    tau: Mapping[str, float]  # tokens that a round commits, the target's own included
    times: Mapping[str, float] = field(default_factory=dict)  # plain decoding, one sequence
    setting: str = ""
    temperature: float | None = None  # None: not said
    least: float | None = None  # what its own engine's test demands


@cache
def published_data() -> Mapping[str, Any]:
    return dict(data_file(__file__, "published.yaml"))


@cache
def acceptance_tables() -> tuple[Acceptance, ...]:
    return tuple(Acceptance(**entry) for entry in published_data()["acceptance"])


def published_acceptance(drafter: str, draft_tokens: int | None = None) -> Acceptance | None:
    """The table to hold a drafter against: with so many draft tokens, or with its most.

    drafter: its id on the Hub, or its name alone, which a directory may have.
    """
    found = [each for each in acceptance_tables() if drafter in _names(each)]
    length = draft_tokens or max((each.draft_tokens for each in found), default=0)
    return next((each for each in found if each.draft_tokens == length), None)


def lowest_believed(drafter: str, draft_tokens: int, engine: str) -> tuple[float, str]:
    """The acceptance length below which something is wrong, and whose figure says so; 0: unknown.

    The engine's own of at most as many draft tokens, since more of them are accepted if more are
    drafted; otherwise a share (`NEAR`) of the lowest that another one published.
    """
    known = [each for each in acceptance_tables() if drafter in _names(each)]
    own = [x for x in known if x.hardware.endswith(engine) and x.draft_tokens <= draft_tokens]
    found = max(own, key=lambda each: each.draft_tokens, default=None)
    found = found or published_acceptance(drafter, draft_tokens)
    if found is None:
        return 0.0, ""
    drafts = f"{found.draft_tokens} draft tokens, {', '.join(found.tau)}"
    least = found.least or NEAR * min(found.tau.values())
    return least, f"{found.source}, {found.hardware}, {drafts}"


def tau_of(entry: Mapping[str, Any]) -> float:
    """Tau of an entry of `figures` or `pareto`, by the table that it names."""
    found = next(each for each in acceptance_tables() if _key(each) == _key_of(entry))
    return found.tau[entry.get("tau_of", entry["task"])]


def eagle_acceptance(target: str) -> Acceptance | None:
    """What is published of EAGLE-3 for a target, its id on the Hub."""
    found = (entry for entry in published_data()["eagle3"] if entry["target"] == target)
    entry = next(found, None)
    if entry is None:
        return None
    fields = {name: entry[name] for name in ("source", "hardware", "draft_tokens", "tau")}
    return Acceptance(name="eagle3", drafter="", **fields)


def published_rows(target: str, drafter: str) -> list[Row]:
    """All that is published of a pair, by its ids on the Hub; [] if it is not there.

    `drafts` are those of a round, `sequences` and `speedup` go together; "" is not said.
    """
    claims = [
        {
            **dict.fromkeys(("drafts", "sequences", "tau"), ""),
            **{name: claim[name] for name in ("source", "hardware", "task")},
            "speedup": f"up to {claim['times']}",
        }
        for claim in published_data()["claims"]
        if (claim["target"], claim["drafter"]) == (target, drafter)
    ]
    if published_data()["drafters"].get(drafter, {}).get("target") != target:
        return claims
    figures = [
        entry
        for entry in published_data()["figures"]
        if entry.get("drafter") == drafter and entry.get("DFlash")
    ]
    shown = {(*_key_of(entry), entry["task"]) for entry in figures}
    return [*map(_figure, figures), *_without_speeds(drafter, shown)]


def _figure(entry: Mapping[str, Any]) -> Row:
    measured = entry["DFlash"]
    speedups = measured.get("times") or [
        round(ours / plain, 1)
        for ours, plain in zip(measured["tokens"], entry["plain"]["tokens"], strict=True)
    ]
    gpus = f"{entry['gpus']} x {machine(entry['machine']).gpu.name}"
    levels = ["not said"] if entry.get("mean") else map(str, entry["concurrency"])
    more = "more than " if entry.get("at_least") else ""
    return {
        "source": entry["source"],
        "hardware": entry.get("hardware", f"{gpus}, {SOFTWARE[entry['software']]}"),
        "task": entry["task"],
        "drafts": "" if "tau_of" in entry else str(_key_of(entry)[2]),
        "sequences": ", ".join(levels),
        "speedup": ", ".join(f"{more}{value}" for value in speedups),
        "tau": "" if "tau_of" in entry else f"{tau_of(entry):.2f}",
    }


def _without_speeds(drafter: str, shown: set[tuple[Any, ...]]) -> Iterator[Row]:
    """Tasks of the acceptance tables that are not among the figures."""
    for table in acceptance_tables():
        temperature = "" if table.temperature is None else f"temperature {table.temperature:g}"
        source = ", ".join(filter(None, (table.source, temperature, table.setting)))
        for task, tau in table.tau.items():
            if table.drafter == drafter and (*_key(table), task) not in shown:
                times = table.times.get(task)
                yield {
                    "source": source,
                    "hardware": table.hardware,
                    "task": task,
                    "drafts": str(table.draft_tokens),
                    "sequences": "1" if times else "",
                    "speedup": f"{times:.2f}" if times else "",
                    "tau": f"{tau:.2f}",
                }


def _names(table: Acceptance) -> tuple[str, str]:
    return table.drafter, table.drafter.split("/")[1]


def _key(table: Acceptance) -> tuple[str, str, int]:
    return (table.name, table.drafter, table.draft_tokens)


def _key_of(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    """The table that an entry names; its drafts are the whole block unless said."""
    block = published_data()["drafters"][entry["drafter"]]["config"]["block_size"]
    drafts = int(entry.get("DFlash", {}).get("drafts", block - 1))
    return (entry.get("acceptance", ""), entry["drafter"], drafts)
