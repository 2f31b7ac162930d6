"""`costs.json` beside the engines: what rounds cost, on each machine that ran them.

It is no part of the build: `manifest.json` does not list it, and a rebuild drops it.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from dflash_trt.atomic import replace_text
from dflash_trt.decoding.messages import RunRound
from dflash_trt.decoding.speculation.costs import Costs, measure
from dflash_trt.digests import sha256
from dflash_trt.engines.info import COSTS_FILE, ENGINE_FILE, read_info
from dflash_trt.engines.load import engine_kind
from dflash_trt.files import EXACT, read_as
from dflash_trt.machine import cpu_model, usable_cores, versions

log = logging.getLogger(__name__)

KEPT = 8  # machines, those measured last

ROLES = ("target", "drafter")


class Machine(TypedDict):
    """What decides the time of a round, engines included."""

    cpu: str
    cores: int
    gpu: str  # "" without one
    kind: str
    library: str
    mode: str
    threads: int
    target: str  # SHA-256 of its engine.json
    drafter: str


@dataclass(frozen=True)
class _Kept:
    """An entry of the file."""

    __pydantic_config__: ClassVar = EXACT

    machine: Machine
    costs: Costs


def costs_of(engines: Path, mode: str, run_round: RunRound, threads: int | None = None) -> Costs:
    """What is kept for this machine, or else measured now and kept; see `measure`.

    engines: holds `target/` and `drafter/`; mode: the way that `run_round` goes, "in_process" or
    "ensemble"; threads: of an engine call, where they are not those of `engine.json`.
    """
    here = this_machine(engines, mode, threads)
    for machine, costs in kept_costs(engines):
        if machine == here:
            return costs
    target, drafter = (read_info(engines / role, here["kind"]) for role in ROLES)
    log.info("measuring what rounds cost on this machine")
    costs = measure(run_round, drafter.block_size, target.slots, target.max_seq_len)
    keep_costs(engines, here, costs)
    return costs


def this_machine(engines: Path, mode: str, threads: int | None = None) -> Machine:
    """Arguments as in `costs_of`."""
    kind = engine_kind(engines / "target")
    info, _ = (read_info(engines / role, kind) for role in ROLES)
    if info.plan is None:
        library, gpu = f"{kind} {versions()[kind]}", ""
    else:
        # here, because CPUs need none of it
        from dflash_trt.tensorrt_llm import gpus  # noqa: PLC0415

        library = f"{info.plan.library} {info.plan.version}"
        gpu = ", ".join(each.name for each in gpus()[: info.ranks])
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "gpu": gpu,
        "kind": kind,
        "library": library,
        "mode": mode,
        "threads": info.threads if threads is None else threads,
        "target": sha256([engines / "target" / ENGINE_FILE]),
        "drafter": sha256([engines / "drafter" / ENGINE_FILE]),
    }


def kept_costs(engines: Path) -> list[tuple[Machine, Costs]]:
    """Of each machine, the last one measured last. What cannot be read is not there."""
    try:
        kept = read_as(engines / COSTS_FILE, list[_Kept])
    except (OSError, ValueError):
        return []
    return [(each.machine, each.costs) for each in kept]


def keep_costs(engines: Path, machine: Machine, costs: Costs) -> None:
    """Write `costs.json` anew, with these in place of older ones of the same machine."""
    kept = [each for each in kept_costs(engines) if each[0] != machine]
    kept = [*kept, (machine, costs)][-KEPT:]
    entries = [{"machine": dict(its), "costs": each.as_json()} for its, each in kept]
    try:
        replace_text(engines / COSTS_FILE, json.dumps(entries) + "\n")
    except OSError as error:
        log.warning(
            "cannot write %s (%s): the costs of rounds are measured at each start",
            engines / COSTS_FILE,
            error.strerror,
        )
