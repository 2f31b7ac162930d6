"""`engine.args` against the arguments that the version takes; all are errors of the config."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from dflash_trt.checkpoints.checks import Found
from dflash_trt.tensorrt_llm.case import Case
from dflash_trt.tensorrt_llm.schema import (
    Status,
    TorchLlmArgs,
    Upstream,
    has,
    nested,
    since,
)


def known_arguments(case: Case) -> Found:
    """Upstream refuses keys that it does not know."""
    unknown = [
        (name, model) for name, model, key, _ in _walk(case) if key not in model.model_fields
    ]
    if not unknown:
        return Found(True, "every argument of engine.args is one of TensorRT-LLM's")
    name, model = unknown[0]
    near = difflib.get_close_matches(name.rpartition(".")[2], model.model_fields, n=1)
    return Found(
        False,
        f"engine.args.{name} is no argument of {model.__name__} in TensorRT-LLM "
        f"{case.engine.version}",
        f"Did you mean {near[0]}?" if near else f"Known: {', '.join(model.model_fields)}",
    )


def arguments_of_version(case: Case) -> Found:
    """An argument, or a value of one, that came with a later version is refused by upstream."""
    version, late = case.engine.version, []
    for name, model, key, value in _walk(case):
        if key in model.model_fields:
            first = since(model.model_fields[key], value if isinstance(value, str) else None)
            if not has(version, first):
                late.append((name, first))
    return Found(
        not late,
        f"engine.args.{late[0][0]} is known from TensorRT-LLM {late[0][1]} on, engine.version is "
        f"{version}"
        if late
        else f"TensorRT-LLM {version} has every argument of engine.args",
        f"Set engine.version to {late[0][1]} or later, or leave the argument out" if late else "",
    )


def argument_types(case: Case) -> Found:
    """Types and ranges as upstream has them; a number in quotes is no number."""
    given = {"model": "target"} | case.engine.args
    try:
        TorchLlmArgs.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        return Found(
            False,
            f"engine.args.{name} is {first['input']!r}, but {message}",
            f"Correct it as TensorRT-LLM {case.engine.version} takes it",
        )
    return Found(True, "the arguments of engine.args have TensorRT-LLM's types")


def speculation_on(case: Case) -> Found:
    """Without `speculative_config` the drafter is not run at all."""
    args = case.engine.args
    return Found(
        "speculative_config" not in args or isinstance(args["speculative_config"], Mapping),
        "engine.args.speculative_config "
        + ("turns speculation off" if "speculative_config" in args else "is not given"),
        "Leave it out, or give fields of DFlashDecodingConfig",
    )


# in this order: the ones behind count on those before
ARGUMENT_CHECKS: tuple[Callable[[Case], Found], ...] = (
    known_arguments,
    arguments_of_version,
    argument_types,
    speculation_on,
)


def marked(case: Case, status: str) -> list[str]:
    """The overrides that upstream marks so: "beta", "prototype" or "deprecated"."""
    return [
        name
        for name, model, key, _ in _walk(case)
        if status in [m.name for m in model.model_fields[key].metadata if isinstance(m, Status)]
    ]


def _walk(case: Case) -> Iterator[tuple[str, type[Upstream], str, Any]]:
    """Each key of engine.args: its dotted name, the class it is a field of, the key, its value."""

    def walk(
        values: Mapping[str, Any], model: type[Upstream], at: str
    ) -> Iterator[tuple[str, type[Upstream], str, Any]]:
        for key, value in values.items():
            yield f"{at}{key}", model, key, value
            section = nested(model.model_fields[key]) if key in model.model_fields else None
            if section is not None and isinstance(value, Mapping):
                yield from walk(value, section, f"{at}{key}.")

    return walk(case.engine.args, TorchLlmArgs, "")
