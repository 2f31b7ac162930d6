"""Published measurements of DFlash pairs: `published.yaml`, with a source for every number.

The hardware and software are those of the sources: `plan` uses their acceptance and is checked
against their speeds; `doctor` compares a deployment with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dflash_trt.files import read_yaml_beside

NEAR = 0.8  # of the lowest acceptance length of another engine, because texts differ


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    name: str
    source: str
    hardware: str  # and software
    drafter: str  # Hub id
    draft_tokens: int  # per round
    tau: Mapping[str, float]  # by task: tokens committed per round, including the target's own
    setting: str = ""
    temperature: float | None = None  # None: unknown
    least: float | None = None  # minimum in its engine's own test


@cache
def published_data() -> Mapping[str, Any]:
    """Return the tables of `published.yaml`; figures name targets without organization."""
    return dict(read_yaml_beside(__file__, "published.yaml"))


@cache
def published_models() -> Mapping[str, Any]:
    """Return `targets` by Hub id, and `drafters`, each with `target` and `config`."""
    return dict(read_yaml_beside(__file__, "models.yaml"))


@cache
def acceptance_tables() -> tuple[Acceptance, ...]:
    return tuple(Acceptance(**entry) for entry in published_data()["acceptance"])


def _tables_of(drafter: str) -> list[Acceptance]:
    """Return a drafter's tables, by its Hub id or its name alone, as a directory may have."""
    return [
        table
        for table in acceptance_tables()
        if drafter in (table.drafter, table.drafter.split("/")[1])
    ]


def published_acceptance(drafter: str, draft_tokens: int | None = None) -> Acceptance | None:
    """Return the table for a drafter with this number of draft tokens, or its largest."""
    tables = _tables_of(drafter)
    length = draft_tokens or max((table.draft_tokens for table in tables), default=0)
    return next((table for table in tables if table.draft_tokens == length), None)


def lowest_believed(drafter: str, draft_tokens: int, engine: str) -> tuple[float, str]:
    """Return the lowest plausible acceptance length and its source; 0: unknown.

    Prefers the engine's own figure with at most as many draft tokens, because more are accepted if
    more are drafted; otherwise a fraction (`NEAR`) of the lowest that another engine published.
    """
    of_engine = [
        table
        for table in _tables_of(drafter)
        if table.hardware.endswith(engine) and table.draft_tokens <= draft_tokens
    ]
    table = max(of_engine, key=lambda table: table.draft_tokens, default=None)
    table = table or published_acceptance(drafter, draft_tokens)
    if table is None:
        return 0.0, ""
    drafts = f"{table.draft_tokens} draft tokens, {', '.join(table.tau)}"
    lowest = table.least or NEAR * min(table.tau.values())
    return lowest, f"{table.source}, {table.hardware}, {drafts}"


def published_config(hub: str) -> Mapping[str, Any] | None:
    """Return a published model's config.json as `plan` reads it; hub: its id. None: unknown."""
    models = published_models()
    drafter = models["drafters"].get(hub, {}).get("config")
    return models["targets"].get(hub) or drafter  # type: ignore[no-any-return]
