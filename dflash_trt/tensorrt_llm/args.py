"""The arguments of one deployment: chosen by rule, overridden by `engine.args`, typed."""

from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from dflash_trt.checkpoints import Pair
from dflash_trt.checkpoints.checks import Finding, NotKnown
from dflash_trt.config import BuildConfig
from dflash_trt.errors import ConfigError
from dflash_trt.roofline import Machine
from dflash_trt.tensorrt_llm.case import Case
from dflash_trt.tensorrt_llm.checks.arguments import ARGUMENT_CHECKS
from dflash_trt.tensorrt_llm.checks.table import findings
from dflash_trt.tensorrt_llm.choices import UNSET
from dflash_trt.tensorrt_llm.chosen import Chosen, LlmArgs
from dflash_trt.tensorrt_llm.rules import RULES, Rule
from dflash_trt.tensorrt_llm.schema import TorchLlmArgs, Upstream, has, nested, since

# upstream's `normalize_optional_fields_to_defaults`
NULL_IS_DEFAULT = {"max_batch_size", "max_num_tokens"}


def choose_args(config: BuildConfig, pair: Pair, machine: Machine) -> LlmArgs:
    """What `LLM(...)` is given; `model` and the drafter are folders beside the written file.

    Raises ConfigError, naming the argument, for what the version does not take.
    """
    case = Case(config, pair, machine)
    for look in ARGUMENT_CHECKS:
        found = look(case)
        if not found.ok:
            raise ConfigError(found.what, found.fix)
    overrides = dict(flat(case.engine.args, TorchLlmArgs))
    values = Values(overrides)
    for name in NULL_IS_DEFAULT & overrides.keys():
        values.data[name] = overrides[name] = overrides[name] or Values()[name]
    chosen = []
    for rule in RULES:
        if not _applies(rule, case, values):
            continue
        try:
            value = rule.choose(case, values)
        except NotKnown:
            continue
        if value is not UNSET:
            values.data[rule.argument] = value
            chosen.append(Chosen(rule.argument, value, rule.how, rule.source))
    chosen += [Chosen(name, value, "given", "engine.args") for name, value in overrides.items()]
    try:
        args = LlmArgs.model_validate(nest(values.data))
    except ValidationError as error:  # of what the checkpoints say
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"{'.'.join(map(str, first['loc']))} would be {first['input']!r}, which TensorRT-LLM "
            "does not take",
            "Check the config.json of target and drafter, or give it in engine.args",
        ) from None
    args._version, args._chosen = case.engine.version, tuple(chosen)
    return args


def check_args(config: BuildConfig, pair: Pair, machine: Machine, args: LlmArgs) -> list[Finding]:
    """Every check of the table; one that is an error must not be deployed.

    The pair itself has its own checks (`checkpoints.pair.findings`).
    """
    return list(findings(Case(config, pair, machine), args))


def env_vars(config: BuildConfig, pair: Pair, machine: Machine) -> dict[str, str]:
    """What is set in the environment of the process that makes the `LLM`.

    The last two from upstream's gpt-oss recipes
    (`examples/configs/database/openai/gpt-oss-120b/B200`).
    """
    case = Case(config, pair, machine)
    # else LLM() reports usage to NVIDIA; engine.args has the word where it says something of it
    silent = "telemetry_config" not in case.engine.args
    found = {"TRTLLM_NO_USAGE_STATS": "1"} if silent else {}
    if case.gpu.sm >= 100:
        found["TRTLLM_ENABLE_PDL"] = "1"  # dependent launches
    return found | ({"NCCL_GRAPH_REGISTER": "0"} if case.gpus > 1 else {})


class Values(UserDict[str, Any]):
    """Arguments by dotted name; those that are not set are upstream's defaults."""

    def __missing__(self, name: str) -> Any:
        model: type[Upstream] | None = TorchLlmArgs
        *sections, last = name.split(".")
        for section in sections:
            assert model is not None
            model = nested(model.model_fields[section])
        assert model is not None
        return model.model_fields[last].get_default(call_default_factory=True)


def flat(
    values: Mapping[str, Any], model: type[Upstream], at: str = ""
) -> Iterator[tuple[str, Any]]:
    """Sections taken apart: ("kv_cache_config.dtype", "fp8"); what is not one or empty is whole."""
    for name, value in values.items():
        section = nested(model.model_fields[name])
        if section is not None and isinstance(value, Mapping) and value:
            yield from flat(value, section, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The other way."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = {} if value == {} else value  # others may go into it
    return found


def _applies(rule: Rule, case: Case, values: Values) -> bool:
    """Neither it nor a section that it lies in is overridden, and the version has it."""
    *sections, last = rule.argument.split(".")
    above = [".".join(sections[: i + 1]) for i in range(len(sections))]
    taken = any(values.data.get(name, {}) != {} for name in above)  # an empty one takes defaults
    if taken or rule.argument in values.data:
        return False
    model: type[Upstream] = TorchLlmArgs
    for section in sections:
        inner = nested(model.model_fields[section])
        assert inner is not None
        model = inner
    return has(case.engine.version, since(model.model_fields[last]))
