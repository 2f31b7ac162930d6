"""Checks of single values, as checks.yaml has them."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.checks import Check, Found, check
from dflash_trt.tensorrt_llm.arguments import LlmArgs, find, read_table, sections_with_keys
from dflash_trt.tensorrt_llm.context import Context

TABLE = read_table("checks.yaml")
OTHERS = ("needs", "excludes", "same_as", "with")  # what names a second argument


@check("error")
def values_that_work(context: Context, args: LlmArgs) -> Found:
    """Upstream refuses, drops or breaks on some values of the right type."""
    for row in TABLE["refused"]:
        name, value = row["argument"], args.value(row["argument"])
        absent = value is None and "." in name  # its section may be null
        if not absent and _is_wrong(row, value, _other(row, args)):
            what = f"engine.args.{name} is {value!r}: {row['why']}"
            return Found(False, what, row.get("fix", "Leave it out"))
    return Found(True, "no argument has a value that TensorRT-LLM refuses or drops")


@check("error")
def keys_of_sections(context: Context, args: LlmArgs) -> Found:
    """Upstream refuses a key that a section does not have."""
    for name in sections_with_keys():
        section = args.value(name)
        if not isinstance(section, Mapping):  # none, or the name of a file
            continue
        argument = find(name)
        known, fix = argument.keys, ""
        if argument.keys_by_algorithm is not None:
            known = argument.keys_by_algorithm.get(str(section.get("algorithm")))
            fix = f"Give one of the algorithms {', '.join(argument.keys_by_algorithm)}"
        for key in section:
            if key not in (known or ()):
                what = f"engine.args.{name} has the key {key!r:.60}, which TensorRT-LLM does not"
                return Found(
                    False, f"{what} know", f"Known there: {', '.join(known)}" if known else fix
                )
    return Found(True, "sections have keys that TensorRT-LLM knows")


def _check(row: Mapping[str, Any]) -> Check[[Context, LlmArgs]]:
    """The check of a row."""

    def look(context: Context, args: LlmArgs) -> Found:
        value, other = args.value(row["argument"]), _other(row, args)
        wrong = _is_wrong(row, value, other)
        said = row.get("failed" if wrong else "found")
        said = said or row["argument"].rpartition(".")[2] + " is {value}"
        return Found(not wrong, said.format(value=_written(value), other=other), row["fix"])

    look.__name__, look.__doc__ = row["name"], row["why"]
    return Check(look, row["severity"], tuple(row.get("methods", ())))


VALUE_CHECKS = [_check(row) for row in TABLE["checks"]]


def _is_wrong(row: Mapping[str, Any], value: Any, other: Any) -> bool:
    conditions: dict[str, Callable[[], bool]] = {
        "is": lambda: value in row["is"],
        "is_not": lambda: value not in row["is_not"],
        "needs": lambda: bool(value) and not other,
        "excludes": lambda: value not in (None, False) and other not in (None, False),
        "same_as": lambda: value not in (None, other),
        "wrong": lambda: WRONG[row["wrong"]](value),
    }
    return all(holds() for name, holds in conditions.items() if name in row)


def _other(row: Mapping[str, Any], args: LlmArgs) -> Any:
    return next((args.value(row[key]) for key in OTHERS if key in row), None)


def _written(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _is_no_size(value: int | None) -> bool:
    return value is not None and value != -1 and value < 1  # -1 is upstream's for not given


def _are_no_parts(value: list[float]) -> bool:
    return min(value, default=0) <= 0 or not math.isclose(sum(value), 1)


def _is_no_file(value: object) -> bool:
    return isinstance(value, str) and not Path(value).is_file()


WRONG: dict[str, Callable[[Any], bool]] = {
    "is_no_size": _is_no_size,
    "are_no_parts": _are_no_parts,
    "is_no_file": _is_no_file,
}
