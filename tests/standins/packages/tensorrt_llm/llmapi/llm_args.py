"""Whether `LLM(...)` takes these arguments."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FIELDS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "arguments.json").read_text()
)
KINDS = {"bool": bool, "int": int, "str": (str, Path), "list": list, "dict": dict, "object": object}


class TorchLlmArgs:
    """The arguments of `LLM(...)`; loads nothing."""

    def __init__(self, **given: Any) -> None:
        check(given)
        check_together(given)


def check(given: Mapping[str, Any], section: str = "LLM") -> None:
    """Raise ValueError for an unknown name or a value of another type, as pydantic does."""
    for name, value in given.items():
        if name not in FIELDS[section]:
            raise ValueError(f"{section}: extra inputs are not permitted: {name}")
        _check_value(f"{section}.{name}", value, FIELDS[section][name])
        if name in REFUSED and REFUSED[name](value):
            raise ValueError(f"{section}.{name} is {value!r}, which is not taken")


# what validators of the class, or of its sections, refuse besides
REFUSED: dict[str, Callable[[Any], bool]] = {
    "draft_len_schedule": lambda value: value == {},
    "free_gpu_memory_fraction": lambda value: value is None,
    "telemetry_config": lambda value: not value.keys() <= {"disabled", "usage_context"},
}


def check_together(given: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that are valid alone and not together."""
    drafting = given.get("speculative_config")
    method = drafting and drafting["decoding_type"]
    for wrong, why in (
        (drafting and not drafting.get("max_draft_len"), f"max_draft_len must be > 0 for {method}"),
        (
            given.get("enable_lm_head_tp_in_adp") and not given.get("enable_attention_dp"),
            "enable_lm_head_tp_in_adp needs enable_attention_dp",
        ),
    ):
        if wrong:
            raise ValueError(f"LLM: {why}")


def _check_value(where: str, value: Any, kind: Any) -> None:
    if kind == "SpeculativeConfig?" and isinstance(value, Mapping):
        method = value.get("decoding_type")
        kind = f"{method}DecodingConfig"
        if kind not in FIELDS:
            raise ValueError(f"{where}: no decoding_type {method!r} is known here")
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
