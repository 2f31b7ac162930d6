"""TensorRT-LLM's arguments: what the rules choose, and each named check on a config that fails it.

The tables are in `cases.yaml`. The stand-ins have the fields of the published gpt-oss-120b and its
drafter, and files that are a header over a hole: shapes and sizes, no weights.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from holes import write_hole
from llm_build import STANDINS

from dflash_trt.checkpoints import (
    TENSORRT_LLM_CHECKS,
    Pair,
    engine_kinds,
    summarize_drafter,
    summarize_target,
)
from dflash_trt.checkpoints.checks import Finding
from dflash_trt.checkpoints.gguf import LINK
from dflash_trt.config import BuildConfig, Version
from dflash_trt.errors import ConfigError
from dflash_trt.planning import PRESETS, machine
from dflash_trt.tensorrt_llm.args import LlmArgs, check_args, choose_args, env_vars
from dflash_trt.tensorrt_llm.arguments import (
    classes,
    find,
    flatten,
    llm_args_class,
    sections_with_keys,
    walk,
)
from dflash_trt.tensorrt_llm.checks import ARGUMENT_CHECKS, CHECKS
from dflash_trt.tensorrt_llm.context import Context
from dflash_trt.tensorrt_llm.draft_len import GAIN, rounds_of
from dflash_trt.tensorrt_llm.rules import Rule, Values, rules

VERSIONS = get_args(Version)
GIB = 1 << 30
Fields = dict[str, Any]

# the published fields, what they are tested with, and what should come of it
TABLES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
DENSE: Fields = TABLES["shared"]["dense"]  # Qwen3-8B, in place of gpt-oss's
TARGET_GIB, DRAFTER_BYTES = 61, 1570 << 20


@dataclass(frozen=True)
class Setup:
    """How a deployment differs from gpt-oss-120b on a DGX B300; None takes a field away."""

    engine: Fields = field(default_factory=dict)
    args: Fields = field(default_factory=dict)
    target: Fields = field(default_factory=dict)
    drafter: Fields = field(default_factory=dict)
    target_gib: int = TARGET_GIB
    target_link: bool = False  # as a directory that was made of a GGUF file has
    config: Fields = field(default_factory=dict)


Deploy = Callable[[Setup], tuple[BuildConfig, Pair]]


@pytest.fixture
def deploy(tmp_path: Path) -> Deploy:
    def write(role: str, fields: Fields, changes: Fields, size: int) -> Path:
        directory = tmp_path / role
        directory.mkdir(exist_ok=True)
        config = {k: v for k, v in (fields | changes).items() if v is not None}
        (directory / "config.json").write_text(json.dumps(config))
        write_hole(directory / "model.safetensors", {"weights": ("BF16", (size // 2,))})
        return directory

    def make(setup: Setup) -> tuple[BuildConfig, Pair]:
        target = write("target", TABLES["model"]["target"], setup.target, setup.target_gib * GIB)
        (target / LINK).unlink(missing_ok=True)
        if setup.target_link:
            (target / LINK).touch()
        drafter = write("drafter", TABLES["model"]["drafter"], setup.drafter, DRAFTER_BYTES)
        engine = {"kind": "tensorrt_llm", "args": setup.args, **setup.engine}
        config = BuildConfig.model_validate(
            {
                "name": "x",
                "target": {"path": target},
                "drafter": {"path": drafter},
                "engine": engine,
                **setup.config,
            }
        )
        models = summarize_target(target), summarize_drafter(drafter)
        return config, Pair(*models, method=config.speculation.method)

    return make


def chosen(deploy: Deploy, setup: Setup) -> LlmArgs:
    config, pair = deploy(setup)
    return choose_args(config, pair, machine(config.engine.hardware))  # type: ignore[union-attr]


def checked(deploy: Deploy, setup: Setup) -> dict[str, Finding]:
    """What was found, by name; a refusal of engine.args is the finding of its check."""
    config, pair = deploy(setup)
    host = machine(config.engine.hardware)  # type: ignore[union-attr]
    try:
        args = choose_args(config, pair, host)
    except ConfigError as error:
        return {"refused": Finding("refused", "error", error.problem, error.fix)}
    return {found.name: found for found in check_args(config, pair, host, args)}


def spec(**fields: Any) -> Fields:
    return {"speculative_config": fields}


def kv(**fields: Any) -> Fields:
    return {"kv_cache_config": fields}


def graphs(**fields: Any) -> Fields:
    return {"cuda_graph_config": fields}


H200 = {"hardware": "hgx-h200"}
OLD = {"version": "1.3.0rc22"}
# the setup that fails the check, and one as near as can be that does not
CASES: dict[str, tuple[Setup, Setup]] = {
    name: (Setup(**each["fails"]), Setup(**each["passes"]))
    for name, each in TABLES["checks"].items()
}
USUAL = {"sampled-requests": "note", "penalties": "note"}  # of gpt-oss-120b on a DGX B300


ALL_CHECKS = [*ARGUMENT_CHECKS, *TENSORRT_LLM_CHECKS, *CHECKS]


@pytest.mark.parametrize("check", CASES)
def test_each_check_fires_on_its_fault_and_not_beside_it(deploy: Deploy, check: str) -> None:
    severity = {each.name: each.severity for each in ALL_CHECKS}[check]
    bad, good = CASES[check]
    found = checked(deploy, bad)[check]
    assert found.result == severity
    assert found.found
    assert found.fix
    assert checked(deploy, good)[check].result == "passed"


def test_a_schedule_with_none_covers_no_more_than_one_that_ends(deploy: Deploy) -> None:
    found = checked(deploy, Setup(args=spec(draft_len_schedule={32: 9, 64: 0})))
    assert found["schedule-covers-batch"].found.startswith("speculation ends above a batch of 32")


@pytest.mark.parametrize("check", TABLES["refused"])
def test_wrong_arguments_are_refused_by_name(deploy: Deploy, check: str) -> None:
    case = TABLES["refused"][check]
    found = checked(deploy, Setup(**case["setup"]))["refused"]
    assert case["problem"] in found.found
    assert case["fix"] in found.fix
    assert checked(deploy, Setup())[check].result == "passed"


@pytest.mark.parametrize("case", TABLES["versions"], ids=str)
def test_what_the_versions_take(deploy: Deploy, case: Fields) -> None:
    found = checked(deploy, Setup(args=case["args"], engine={"version": case["version"]}))
    assert ("refused" not in found) == case["taken"]


@pytest.mark.parametrize("args", TABLES["wrong"], ids=str)
def test_sets_that_tensorrt_llm_refuses_or_breaks_on_are_refused(
    deploy: Deploy, args: Fields
) -> None:
    found = checked(deploy, Setup(args=args))
    [said] = [each for each in found.values() if each.result == "error"] or [found.get("refused")]
    assert said is not None
    section, value = next(iter(args.items()))
    names = (section, *(value if type(value) is dict else ()))
    assert any(name in said.found + said.fix for name in names)
    assert said.fix


standin_check = runpy.run_path(str(STANDINS / "tensorrt_llm" / "llmapi" / "llm_args.py"))["check"]


@pytest.mark.parametrize("name", sections_with_keys())
def test_a_section_has_no_key_that_upstream_refuses(deploy: Deploy, name: str) -> None:
    """By the build and by the stand-in; what upstream has passes both."""
    argument = find(name)
    right: Fields = dict.fromkeys(argument.keys or (), 1)
    if argument.keys_by_algorithm:
        algorithm, keys = next(iter(argument.keys_by_algorithm.items()))
        right = dict.fromkeys(keys, 1) | {"algorithm": algorithm}
    for section, taken in ((right, True), ({**right, "nonsense": 1}, False)):
        args: Fields = section
        for part in reversed(name.split(".")):
            args = {part: args}
        found = checked(deploy, Setup(args=args))["keys-of-sections"]
        assert (found.result == "passed") == taken
        assert taken or f"engine.args.{name} has the key 'nonsense'" in found.found
        with nullcontext() if taken else pytest.raises(ValueError, match="nonsense"):
            standin_check(args)


def test_a_section_of_an_unknown_algorithm_names_the_known_ones(deploy: Deploy) -> None:
    args = {"sparse_attention_config": {"algorithm": "rokcet"}}
    found = checked(deploy, Setup(args=args))["keys-of-sections"]
    assert (found.result, "rocket" in found.fix) == ("error", True)


def test_concurrency_is_limited_only_where_it_has_an_effect(deploy: Deploy) -> None:
    args = {**spec(max_concurrency=8), "max_batch_size": 8}
    old = checked(deploy, Setup(args=args, engine=OLD))["refused"]
    assert "max_concurrency is known from TensorRT-LLM 1.3.0rc27 on" in old.found
    assert "refused" not in checked(deploy, Setup(args=args))


def test_an_empty_section_stays_and_takes_defaults(deploy: Deploy) -> None:
    given = {"torch_compile_config": {}, "kv_cache_config": {}}
    args = chosen(deploy, Setup(args=given)).to_dict()
    assert args["torch_compile_config"] == {}
    assert args["kv_cache_config"]["enable_block_reuse"] is False
    assert given == {"torch_compile_config": {}, "kv_cache_config": {}}


def test_every_check_has_a_case() -> None:
    names = [check.name for check in ALL_CHECKS]
    assert len(names) == len(set(names))
    assert set(names) == CASES.keys() | TABLES["refused"].keys()
    assert {check.name for check in ARGUMENT_CHECKS} == TABLES["refused"].keys()
    assert all(check.look.__doc__ for check in ALL_CHECKS)


def test_the_headline_pair_has_nothing_to_find_fault_with(deploy: Deploy) -> None:
    found = checked(deploy, Setup())
    assert {n: f.result for n, f in found.items() if f.result != "passed"} == USUAL


def test_the_dense_context_is_upstreams_arithmetic(deploy: Deploy) -> None:
    """8 layers, keys and values of one KV head of 64 in bf16 on each of eight GPUs."""
    found = checked(deploy, CASES["dense-context"][0])["dense-context"]
    slot = 2 * 8 * (131072 + 10) * 1 * 64 * 2
    budget = int((143771 * (1 << 20) - TARGET_GIB * GIB // 8 - 4 * GIB) * (1 - 0.8) * 0.7)
    for figure in (81 * slot / GIB, budget / GIB):
        assert f"{figure:.2f} GiB" in found.found
    fits = budget // slot - 1
    assert found.fix == f"Set max_batch_size to at most {fits}"
    assert chosen(deploy, Setup(engine={**H200, "concurrency": 999})).max_batch_size == fits
    # with attention-DP each rank has all eight KV heads
    alone = Setup(engine={**H200, "objective": "throughput", "concurrency": 999})
    assert chosen(deploy, alone).max_batch_size == budget // (8 * slot) - 1


@pytest.mark.parametrize("case", TABLES["chosen"], ids=lambda case: str(case["engine"]))
def test_what_the_rules_choose(deploy: Deploy, case: Fields) -> None:
    values = chosen(deploy, Setup(engine=case["engine"])).model_dump()
    assert {path: at(values, path) for path in case["values"]} == case["values"]


def at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = None if values is None else values[part]
    return values


QWEN: Fields = {**DENSE, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}


def dense(**changes: Any) -> Setup:
    """A target as wide as Qwen3-8B on one B300, and a drafter with a block of 16."""
    engine = {"gpus": 1, "concurrency": 256} | changes.pop("engine", {})
    drafter = {"block_size": 16, "hidden_size": 4096, "num_attention_heads": 32}
    return Setup(target=QWEN, drafter=drafter, engine=engine, target_gib=16, **changes)


def test_drafts_get_fewer_where_the_model_has_them_faster(deploy: Deploy) -> None:
    setup = dense()
    found = chosen(deploy, setup).speculative_config.draft_len_schedule
    assert found is not None
    assert list(found) == sorted(found)
    assert list(found.values()) == sorted(set(found.values()), reverse=True)
    assert found[min(found)] == 15
    assert max(found) == 256
    assert min(found.values()) >= 1  # with none the drafter starves
    config, pair = deploy(setup)
    context = Context(config, pair, machine("dgx-b300"))
    rounds = rounds_of(context, flat_values(chosen(deploy, setup)))
    low = 1
    for rows, drafts in found.items():
        # as the model has it, where a step begins and where it ends
        for n in (low, rows):
            rates = {d: rounds.rate(n, d) for d in range(1, 16)}
            assert max(rates.values()) <= 1.1 * rates[drafts], (n, drafts)
        low = rows * 2
    assert rounds.rate(256, found[256]) > GAIN * rounds.rate(256, 15)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),  # a token of a mixture of experts uses few of them
        dense(engine={"concurrency": 8}),
        dense(engine={"version": "1.3.0rc26"}),
        dense(config={"speculation": {"policy": "fixed"}}),
        dense(config={"speculation": {"draft_tokens": 15}}),
        dense(args=spec(max_concurrency=256)),
        dense(engine={"gpus": 8, "concurrency": 2048}, args={"enable_attention_dp": True}),
    ],
    ids=["experts", "few", "old", "fixed", "draft-tokens", "concurrency", "attention-dp"],
)
def test_a_schedule_is_left_out(deploy: Deploy, setup: Setup) -> None:
    assert chosen(deploy, setup).speculative_config.draft_len_schedule is None


def test_an_acceptance_threshold_needs_a_window_of_the_users(deploy: Deploy) -> None:
    def made(**changes: Any) -> float | None:
        setup = dense(args=spec(acceptance_rate_window_size=64), **changes)
        return chosen(deploy, setup).speculative_config.acceptance_rate_threshold

    assert chosen(deploy, dense()).speculative_config.acceptance_rate_threshold is None
    assert made(config={"speculation": {"policy": "fixed"}}) is None
    found = made()
    config, pair = deploy(dense())
    context = Context(config, pair, machine("dgx-b300"))
    rounds = rounds_of(context, flat_values(chosen(deploy, dense())))
    shares = [(rounds.seconds(n, 15) / rounds.seconds(n, 0) - 1) / 15 for n in (1, 16, 256)]
    assert shares == sorted(shares)
    assert found == pytest.approx(0.8 * shares[0], abs=5e-4)
    # with that share of them accepted, a round gives as many tokens a second
    assert (1 + 15 * shares[0]) / rounds.seconds(1, 15) == pytest.approx(1 / rounds.seconds(1, 0))


def flat_values(args: LlmArgs) -> Values:
    return Values(flatten(args.to_dict()))


@pytest.mark.parametrize("version", VERSIONS)
def test_only_what_a_version_has_is_written(deploy: Deploy, version: Version) -> None:
    """Over every preset and objective; what is written reads back as the same arguments."""

    config, pair = deploy(Setup(engine={"version": version}))
    for preset in PRESETS.values():
        for objective in ("latency", "balanced", "throughput"):
            engine = config.engine.model_copy(update={"objective": objective})
            made = config.model_copy(update={"engine": engine})
            args = choose_args(made, pair, preset)
            assert args.version == version
            for path, inside, key, value in walk(args.to_dict()):
                argument = classes()[inside][key]
                first = argument.since
                if isinstance(value, str):
                    first = argument.values_since.get(value, first)
                assert VERSIONS.index(first) <= VERSIONS.index(version), path
            again = llm_args_class("dflash").model_validate(yaml.safe_load(args.to_yaml()))
            assert again.model_dump(exclude_unset=True) == args.to_dict()
            errors = [f for f in check_args(made, pair, preset, args) if f.result == "error"]
            assert errors == []


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.argument)
def test_every_rule_can_be_overridden(deploy: Deploy, rule: Rule) -> None:
    """With what it would choose, or upstream's default; the source says who chose it."""
    of = {"speculation": {"method": rule.methods[0]}} if rule.methods else {}
    own = at(chosen(deploy, Setup(config=of)).typed.model_dump(), rule.argument)
    value = Values()[rule.argument] if own is None else own
    *sections, last = rule.argument.split(".")
    args: Fields = {last: value}
    for section in reversed(sections):
        args = {section: args}
    made = chosen(deploy, Setup(args=args, config=of))
    assert at(made.to_dict(), rule.argument) == value
    given = [each for each in made.chosen if each.argument.startswith(rule.argument)]
    assert {each.source for each in given} == {"engine.args"}


def test_rules_follow_what_is_overridden(deploy: Deploy) -> None:
    args = chosen(deploy, Setup(args={"max_batch_size": 4096, **kv(dtype="bfloat16")}))
    assert args.max_num_tokens == 40960
    assert args.cuda_graph_config is not None
    assert args.cuda_graph_config.batch_sizes is not None
    assert args.cuda_graph_config.batch_sizes[-1] == 4096
    # a section is merged, a mapping that is a value is not
    assert args.kv_cache_config.enable_block_reuse is False
    schedule = {8: 9, 64: 1}
    own = chosen(deploy, Setup()).to_dict()["speculative_config"]
    made = chosen(deploy, Setup(args=spec(draft_len_schedule=schedule))).to_dict()
    assert made["speculative_config"] == {**own, "draft_len_schedule": schedule}
    assert chosen(deploy, Setup(args=graphs(max_batch_size=32))).to_dict()["cuda_graph_config"] == {
        "batch_sizes": [1, 2, 4, 8, 16, 24, 32],
        "max_batch_size": 32,
        "enable_padding": True,
    }
    assert chosen(deploy, Setup(args={"max_batch_size": None})).max_batch_size == 2048
    throughput = Setup(
        engine={"objective": "throughput"}, args={"attention_dp_config": {"timeout_iters": 5}}
    )
    assert chosen(deploy, throughput).to_dict()["attention_dp_config"] == {
        "enable_balance": True,
        "batching_wait_iters": 50,
        "timeout_iters": 5,
    }
    assert (
        chosen(deploy, Setup(args={"cuda_graph_config": None})).to_dict()["cuda_graph_config"]
        is None
    )


def test_the_target_is_a_folder_or_a_hub_id(deploy: Deploy) -> None:
    assert chosen(deploy, Setup()).to_dict()["model"] == "target"
    args = chosen(deploy, CASES["hub-target"][1])
    assert (args.model, args.revision) == ("a/b", "c")
    assert args.speculative_config.speculative_model == "drafter"


def test_more_gpus_than_there_are(deploy: Deploy) -> None:
    with pytest.raises(ConfigError, match=re.escape("engine.gpus is 16, but dgx-b300 has 8")):
        chosen(deploy, Setup(engine={"gpus": 16}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_position_embeddings": -1}, "max_seq_len would be -1"),
        ({"block_size": 0}, "speculative_config.max_draft_len would be -1"),
    ],
)
def test_a_drafter_with_odd_numbers(deploy: Deploy, changes: Fields, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        chosen(deploy, Setup(drafter=changes))


@pytest.mark.parametrize("field", ["num_attention_heads", "num_key_value_heads", "head_dim"])
def test_heads_that_cannot_be(deploy: Deploy, field: str) -> None:
    found = checked(deploy, Setup(drafter={field: -4}))
    assert found["heads-divide"].result == "not checked"


def test_the_environment(deploy: Deploy) -> None:
    config, pair = deploy(Setup())
    b300 = machine("dgx-b300")
    silent = {"TRTLLM_NO_USAGE_STATS": "1", "TRTLLM_ENABLE_PDL": "1"}
    assert env_vars(config, pair, b300) == {**silent, "NCCL_GRAPH_REGISTER": "0"}
    config, pair = deploy(Setup(engine={"gpus": 1}))
    assert env_vars(config, pair, b300) == silent
    args = {"telemetry_config": {"disabled": False}}  # reporting is allowed
    config, pair = deploy(Setup(engine={"gpus": 1}, args=args))
    assert env_vars(config, pair, b300) == {"TRTLLM_ENABLE_PDL": "1"}


def test_the_kinds_say_the_same(deploy: Deploy) -> None:
    """`inspect` lists what stands against a pair, whatever its configuration."""
    for check in ("hidden-states-captured", "drafter-layout", "drafter-method", "taps-ascending"):
        _, pair = deploy(CASES[check][0])
        (kind,) = (k for k in engine_kinds(pair, []) if k["kind"] == "tensorrt_llm")
        assert not kind["fits"]
    _, pair = deploy(CASES["listed-upstream"][0])
    (kind,) = (k for k in engine_kinds(pair, []) if k["kind"] == "tensorrt_llm")
    assert kind["fits"]
    assert len(kind["notes"]) == 1


def rendered() -> list[str]:
    """The tables of docs/tensorrt_llm.md on rules and checks."""
    chosen_by = ["| argument | how it is chosen | source |", "|---|---|---|"]
    chosen_by += [f"| `{rule.argument}` | {rule.how} | {rule.source} |" for rule in rules()]
    checks = ["| check | severity | without it |", "|---|---|---|"]
    for check in ALL_CHECKS:
        assert check.look.__doc__
        first = check.look.__doc__.strip().split("\n\n")[0]
        checks.append(f"| `{check.name}` | {check.severity} | {' '.join(first.split())} |")
    return ["\n".join(chosen_by), "\n".join(checks)]


def test_the_documented_tables_are_these() -> None:
    document = (Path(__file__).parents[2] / "docs" / "tensorrt_llm.md").read_text()
    for table in rendered():
        assert f"\n\n{table}\n\n" in document
