"""Whether `LLM(...)` takes these arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIELDS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "arguments.json").read_text()
)
KINDS = {"bool": bool, "int": int, "str": (str, Path), "list": list, "dict": dict, "object": object}


def check(given: Mapping[str, Any], section: str = "LLM") -> None:
    """ValueError for a name that is not there or a value of another type, as pydantic would."""
    for name, value in given.items():
        if name not in FIELDS[section]:
            raise ValueError(f"{section}: extra inputs are not permitted: {name}")
        _check_value(f"{section}.{name}", value, FIELDS[section][name])


def _check_value(where: str, value: Any, kind: Any) -> None:
    if isinstance(kind, list):
        fits = value in kind
    elif kind.endswith("?") and value is None:
        fits = True
    elif (name := kind.rstrip("?")) in FIELDS:
        fits = isinstance(value, Mapping)
        if fits:
            check(value, name)
    elif name == "float":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = isinstance(value, KINDS[name]) and (name != "int" or not isinstance(value, bool))
    if not fits:
        raise ValueError(f"{where} is {value!r}, not {kind}")
