"""The named checks of a deployment, by subject; those of single values are rows of checks.yaml.

An error does not start, or never drafts well; a warning is slow, or worse than it could be; a note
is what a user of the server may meet.
"""

from dflash_trt.checkpoints.checks import Check, checks_of
from dflash_trt.tensorrt_llm.arguments import LlmArgs
from dflash_trt.tensorrt_llm.checks import (
    arguments,
    drafting,
    machine,
    memory,
    reuse,
    serving,
    values,
)
from dflash_trt.tensorrt_llm.context import Context

ARGUMENT_CHECKS: list[Check[[Context]]] = [
    arguments.speculation_on,
    arguments.known_arguments,
    arguments.arguments_of_version,
    arguments.argument_types,
]
CHECKS: list[Check[[Context, LlmArgs]]] = [
    *checks_of(values),
    *values.VALUE_CHECKS,
    *checks_of(drafting, memory, reuse, machine, serving),
    arguments.deprecated_arguments,
    arguments.unstable_arguments,
]
