"""`engine.args` against the arguments that the version takes; all are errors of the config."""

import difflib
from collections.abc import Mapping

from pydantic import ValidationError

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.tensorrt_llm.arguments import LlmArgs, class_of, classes, has, llm_args_class, walk
from dflash_trt.tensorrt_llm.context import Context

# each counts on those before it


@check("error")
def known_arguments(context: Context) -> Found:
    """Upstream refuses keys that it does not know."""
    for name, inside, key, _ in walk(context.engine.args):
        inside = class_of(inside, context.method)
        known = classes()[inside]
        if key not in known:
            version = context.engine.version
            near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
            return Found(
                False,
                f"engine.args.{name} is no argument of {inside} in TensorRT-LLM {version}",
                f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}",
            )
    return Found(True, "every argument of engine.args is one of TensorRT-LLM's")


@check("error")
def arguments_of_version(context: Context) -> Found:
    """An argument, or a value of one, that came with a later version is refused by upstream."""
    version = context.engine.version
    for name, inside, key, value in walk(context.engine.args):
        argument = classes()[inside].get(key)
        if argument is None:
            continue
        first = argument.since
        if isinstance(value, str):
            first = argument.values_since.get(value, first)
        if not has(version, first):
            return Found(
                False,
                f"engine.args.{name} is known from TensorRT-LLM {first} on, engine.version is "
                f"{version}",
                f"Set engine.version to {first} or later, or leave the argument out",
            )
    return Found(True, f"TensorRT-LLM {version} has every argument of engine.args")


@check("error")
def argument_types(context: Context) -> Found:
    """Types and ranges as upstream has them; a number in quotes is no number."""
    try:
        llm_args_class(context.method).model_validate({"model": "target"} | context.engine.args)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        return Found(
            False,
            f"engine.args.{name} is {first['input']!r}, but {message}",
            f"Correct it as TensorRT-LLM {context.engine.version} takes it",
        )
    return Found(True, "the arguments of engine.args have TensorRT-LLM's types")


@check("error")
def speculation_on(context: Context) -> Found:
    """Without `speculative_config` the drafter is not run at all."""
    args, name = context.engine.args, "speculative_config"
    if context.method == "none":
        given = args.get(name) is not None
        what = f"engine.args.{name} is {'' if given else 'not '}given, speculation.method is none"
        return Found(not given, what, "Leave it out, or set the method")
    return Found(
        name not in args or isinstance(args[name], Mapping),
        f"engine.args.{name} {'turns speculation off' if name in args else 'is not given'}",
        "Leave it out, or set speculation.method: none",
    )


@check("warning")
def deprecated_arguments(context: Context, args: LlmArgs) -> Found:
    """Upstream will take them away."""
    found = ", ".join(_marked(context, "deprecated"))
    return Found(not found, f"deprecated in engine.args: {found or 'nothing'}", "Leave them out")


@check("note")
def unstable_arguments(context: Context, args: LlmArgs) -> Found:
    """Upstream may change prototypes with any release."""
    found = ", ".join(_marked(context, "prototype"))
    fix = "Pin engine.version, and build again before changing it"
    return Found(not found, f"prototypes in engine.args: {found or 'none'}", fix)


def _marked(context: Context, status: str) -> list[str]:
    """The overrides that upstream marks so."""
    given = walk(context.engine.args)
    return [name for name, inside, key, _ in given if classes()[inside][key].status == status]
