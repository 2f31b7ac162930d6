"""The arguments of one deployment: chosen by rule, overridden by `engine.args`, typed."""

from collections.abc import Iterator

from pydantic import ValidationError

from dflash_trt.checkpoints import TENSORRT_LLM_CHECKS, Pair
from dflash_trt.checkpoints.checks import Finding, NotKnown, checks_for, run
from dflash_trt.config import BuildConfig
from dflash_trt.errors import ConfigError
from dflash_trt.planning import Machine
from dflash_trt.tensorrt_llm.arguments import Chosen, LlmArgs, flatten, llm_args_class, nest
from dflash_trt.tensorrt_llm.checks import ARGUMENT_CHECKS, CHECKS
from dflash_trt.tensorrt_llm.context import Context
from dflash_trt.tensorrt_llm.rules import UNSET, Values, rules

# upstream's `normalize_optional_fields_to_defaults`
NULL_IS_DEFAULT = {"max_batch_size", "max_num_tokens"}


def choose_args(config: BuildConfig, pair: Pair, machine: Machine) -> LlmArgs:
    """What `LLM(...)` is given; `model` and the drafter are folders beside the written file.

    Raises ConfigError, naming the argument, for what the version does not take.
    """
    context = Context(config, pair, machine)
    for check in checks_for(ARGUMENT_CHECKS, context.method):
        finding = check(context)
        if finding.result == "error":
            raise ConfigError(finding.found, finding.fix)
    overrides = flatten(context.engine.args)
    values = Values(overrides)
    for name in NULL_IS_DEFAULT & overrides.keys():
        values[name] = overrides[name] = overrides[name] or Values()[name]
    chosen = []
    for rule in rules():
        if not rule.applies(context, values):
            continue
        try:
            value = rule(context, values)
        except NotKnown:
            continue
        if value is not UNSET:
            values[rule.argument] = value
            chosen.append(Chosen(rule.argument, value, rule.how, rule.source))
    chosen += [Chosen(name, value, "given", "engine.args") for name, value in overrides.items()]
    try:
        typed = llm_args_class(context.method).model_validate(nest(values.data))
    except ValidationError as error:  # for what the checkpoints say
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"{'.'.join(map(str, first['loc']))} would be {first['input']!r}, which TensorRT-LLM "
            "does not take",
            "Check the config.json of target and drafter, or give it in engine.args",
        ) from None
    return LlmArgs(context.engine.version, tuple(chosen), typed)


def check_args(
    config: BuildConfig, pair: Pair, machine: Machine, args: LlmArgs
) -> Iterator[Finding]:
    """Every check's finding; one that is an error must not be deployed.

    The pair itself has its own checks (`checkpoints.pair_findings`).
    """
    context = Context(config, pair, machine)
    yield from run(checks_for(ARGUMENT_CHECKS, context.method), context)
    yield from run(checks_for(TENSORRT_LLM_CHECKS, context.method), pair)
    yield from run(checks_for(CHECKS, context.method), context, args)


def env_vars(config: BuildConfig, pair: Pair, machine: Machine) -> dict[str, str]:
    """What is set in the environment of the process that makes the `LLM`.

    The last two are from upstream's gpt-oss recipes
    (`examples/configs/database/openai/gpt-oss-120b/B200`).
    """
    context = Context(config, pair, machine)
    # otherwise LLM() reports usage to NVIDIA; engine.args decides where it says something of it
    silent = "telemetry_config" not in context.engine.args
    found = {"TRTLLM_NO_USAGE_STATS": "1"} if silent else {}
    if context.gpu.sm >= 100:
        found["TRTLLM_ENABLE_PDL"] = "1"  # dependent launches
    return found | ({"NCCL_GRAPH_REGISTER": "0"} if context.gpus > 1 else {})
