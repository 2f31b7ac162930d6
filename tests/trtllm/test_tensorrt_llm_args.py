"""TensorRT-LLM's arguments: what the rules choose, and each named check on a config that fails it.

The tables are in `cases.yaml`. The stand-ins have the fields of the published gpt-oss-120b and its
drafter, and files that are a header over a hole: shapes and sizes, no weights.
"""

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from dflash_trt.checkpoints import Pair, open_drafter, open_target
from dflash_trt.checks import TENSORRT_LLM_CHECKS, Finding
from dflash_trt.config import BuildConfig
from dflash_trt.errors import ConfigError
from dflash_trt.hardware import PRESETS
from dflash_trt.tensorrt_llm import (
    Context,
    LlmArgs,
    argument_checks,
    check_args,
    choose_args,
    env_vars,
)
from dflash_trt.tensorrt_llm.llm_args import BINDING
from dflash_trt.tensorrt_llm.schema import schema
from dflash_trt.weights.gguf import LINK
from tests.support.llm_build import STANDINS
from tests.support.sparse_files import write_hole

GIB = 1 << 30
Fields = dict[str, Any]

# the published fields, what they are tested with, and what should come of it
TABLES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
TABLES["schema"] = {
    which: {name: set(fields) for name, fields in classes.items()}
    for which, classes in TABLES["schema"].items()
}
TARGET_GIB, DRAFTER_BYTES = 61, 1570 << 20


@dataclass(frozen=True)
class Setup:
    """How a deployment differs from gpt-oss-120b on a DGX B300; None removes a field."""

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
        fields = {"name": "x", "target": {"path": target}, "drafter": {"path": drafter}}
        fields["engine"] = {"kind": "tensorrt_llm", "args": setup.args, **setup.engine}
        config = BuildConfig.model_validate({**fields, **setup.config})
        models = open_target(target), open_drafter(drafter)
        return config, Pair(*models, method=config.speculation.method)

    return make


def chosen(deploy: Deploy, setup: Setup) -> LlmArgs:
    return choose_args(Context(*deploy(setup)))


def checked(deploy: Deploy, setup: Setup) -> dict[str, Finding]:
    context = Context(*deploy(setup))
    try:
        args = choose_args(context)
    except ConfigError as error:
        return {"refused": Finding("refused", "error", error.problem, error.fix)}
    return {found.name: found for found in check_args(context, args)}


def spec(**fields: Any) -> Fields:
    return {"speculative_config": fields}


H200 = {"hardware": "hgx-h200"}
# the setup that fails the check, and one as near as can be that does not
CASES: dict[str, tuple[Setup, Setup]] = {
    name: (Setup(**each["fails"]), Setup(**each["passes"]))
    for name, each in TABLES["checks"].items()
}
# of gpt-oss-120b on a DGX B300; the fault is of gpt-oss on several GPUs
USUAL = {"sampled-requests": "note", "faults-known": "warning"}


ALL_CHECKS = [*TENSORRT_LLM_CHECKS, *argument_checks.ARGUMENT_CHECKS]


@pytest.mark.parametrize("check", CASES)
def test_each_check_fires_on_its_fault_and_not_beside_it(deploy: Deploy, check: str) -> None:
    severity = {each.name: each.severity for each in ALL_CHECKS}[check]
    bad, good = CASES[check]
    found = checked(deploy, bad)[check]
    assert found.result == severity
    assert found.found
    assert found.fix
    assert checked(deploy, good)[check].result == "passed"


@pytest.mark.parametrize("case", TABLES["refused"], ids=lambda case: str(case["args"]))
def test_wrong_arguments_are_refused_by_name(deploy: Deploy, case: Fields) -> None:
    found = checked(deploy, Setup(args=case["args"]))["refused"]
    assert case["problem"] in found.found
    assert case.get("fix", "") in found.fix
    assert found.fix


@pytest.mark.parametrize("args", TABLES["wrong"], ids=str)
def test_values_that_nobody_else_refuses(deploy: Deploy, args: Fields) -> None:
    found = checked(deploy, Setup(args=args))["values-that-work"]
    assert found.result == "error"
    assert f"engine.args.{next(iter(args))}" in found.found
    assert found.fix


def test_arguments_without_drafts_may_be_what_speculation_cannot_be(deploy: Deploy) -> None:
    plain = {"speculation": {"method": "none"}}
    setup = Setup(config=plain, args={"context_parallel_size": 2})
    assert checked(deploy, setup)["values-that-work"].result == "passed"
    given = checked(deploy, Setup(config=plain, args=spec(max_draft_len=3)))["refused"]
    assert "engine.args.speculative_config is given, but speculation.method is none" in given.found


standin = runpy.run_path(str(STANDINS / "tensorrt_llm" / "llmapi" / "llm_args.py"))


def test_the_schema_is_one_and_has_what_the_stand_in_has() -> None:
    """The stand-in's table was written down apart from ours, of an older commit."""
    Draft202012Validator.check_schema(schema())
    newer, gone = {}, {}
    for name, published in {"LLM": schema(), **schema()["$defs"]}.items():
        if name in standin["FIELDS"]:
            ours, known = published["properties"].keys(), standin["FIELDS"][name].keys()
            newer |= {name: ours - known} if ours - known else {}
            gone |= {name: known - ours} if known - ours else {}
    assert (newer, gone) == (TABLES["schema"]["newer"], TABLES["schema"]["gone"])


def test_every_check_has_a_case() -> None:
    names = [check.name for check in ALL_CHECKS]
    assert len(names) == len(set(names))
    assert set(names) == CASES.keys()
    assert all(check.look.__doc__ for check in ALL_CHECKS)


def test_the_headline_pair_has_nothing_to_find_fault_with(deploy: Deploy) -> None:
    found = checked(deploy, Setup())
    assert {n: f.result for n, f in found.items() if f.result != "passed"} == USUAL


def test_the_cache_manager_is_decided(deploy: Deploy) -> None:
    for method in ("dflash", "eagle3", "ngram", "none"):
        for target in ({}, TABLES["shared"]["dense"]):
            setup = Setup(config={"speculation": {"method": method}}, target=target)
            given = chosen(deploy, setup).given["kv_cache_config"]["use_kv_cache_manager_v2"]
            assert given == (method != "eagle3" or target != {})


def test_a_method_that_upstream_has_is_refused_with_the_reason(deploy: Deploy) -> None:
    finding = checked(deploy, Setup(drafter={"architectures": ["LiLiCorrDraftModel"]}))
    assert finding["drafter-method"].result == "error"
    assert "pull request 19856" in finding["drafter-method"].found


POOL_FIRST = [
    {"attn_backend": "VANILLA"},
    {"cp_config": {}},
    {"env_overrides": {"TRTLLM_SKIP_KV_CACHE_ESTIMATION": "1"}},
]
ARENA_FIRST: list[Fields] = [{}, {"env_overrides": {"TRTLLM_SKIP_KV_CACHE_ESTIMATION": "0"}}]


@pytest.mark.parametrize("args", [*POOL_FIRST, *ARENA_FIRST], ids=str)
def test_the_batch_is_what_the_arena_leaves_room_for(deploy: Deploy, args: Fields) -> None:
    """Upstream's cases of `_kv_cache_estimation_runs`; gpt-oss-120b on eight H200."""
    batch = chosen(deploy, Setup(engine={**H200, "concurrency": 9999}, args=args)).max_batch_size
    assert (batch < 100) == (args in POOL_FIRST)
    # with attention-DP each rank has all eight KV heads, and a batch of its own
    throughput = {**H200, "objective": "throughput", "concurrency": 9999}
    alone = chosen(deploy, Setup(engine=throughput, args=args)).max_batch_size
    assert batch / 12 < alone < batch / 6


@pytest.mark.parametrize("case", TABLES["chosen"], ids=lambda case: str(case["engine"]))
def test_what_the_rules_choose(deploy: Deploy, case: Fields) -> None:
    values = chosen(deploy, Setup(engine=case["engine"])).complete
    assert {path: at(values, path) for path in case["values"]} == case["values"]


def at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = None if values is None else values[part]
    return values


@pytest.mark.parametrize("method", ["dflash", "eagle3", "ngram", "none"])
def test_what_is_written_is_taken(deploy: Deploy, method: str) -> None:
    """It reads back as the same arguments, for every preset and objective."""
    config, pair = deploy(Setup(config={"speculation": {"method": method}}))
    for preset in PRESETS.values():
        for objective in ("latency", "balanced", "throughput"):
            engine = config.engine.model_copy(update={"objective": objective})
            context = Context(config.model_copy(update={"engine": engine}), pair, preset)
            args = choose_args(context)
            assert LlmArgs(yaml.safe_load(args.to_yaml())).complete == args.complete
            standin["TorchLlmArgs"](**args.given)
            errors = [f for f in check_args(context, args) if f.result == "error"]
            if method == "dflash":
                assert errors == []


def test_rules_follow_what_is_overridden(deploy: Deploy) -> None:
    large = {"max_batch_size": 4096, "kv_cache_config": {"dtype": "bfloat16"}}
    args = chosen(deploy, Setup(args=large))
    assert args.max_num_tokens == 40960
    assert args.cuda_graph_config is not None
    assert args.cuda_graph_config.batch_sizes is not None
    assert args.cuda_graph_config.batch_sizes[-1] == 4096
    # a section is merged, a mapping that is a value is not
    assert args.kv_cache_config.enable_block_reuse is False
    schedule = {8: 9, 64: 1}
    usual = chosen(deploy, Setup()).given["speculative_config"]
    changed = chosen(deploy, Setup(args=spec(draft_len_schedule=schedule))).given
    assert changed["speculative_config"] == {**usual, "draft_len_schedule": schedule}
    graphs = {"cuda_graph_config": {"max_batch_size": 32}}
    assert chosen(deploy, Setup(args=graphs)).given["cuda_graph_config"] == {
        "batch_sizes": [1, 2, 4, 8, 16, 24, 32],
        "max_batch_size": 32,
        "enable_padding": True,
    }
    assert chosen(deploy, Setup(args={"max_batch_size": None})).max_batch_size == 2048
    timeout = {"attention_dp_config": {"timeout_iters": 5}}
    throughput = Setup(engine={"objective": "throughput"}, args=timeout)
    assert chosen(deploy, throughput).given["attention_dp_config"] == {
        "enable_balance": True,
        "batching_wait_iters": 50,
        "timeout_iters": 5,
    }
    no_graphs = chosen(deploy, Setup(args={"cuda_graph_config": None}))
    assert no_graphs.given["cuda_graph_config"] is None


def test_more_gpus_than_there_are(deploy: Deploy) -> None:
    with pytest.raises(ConfigError, match=re.escape("engine.gpus is 16, but dgx-b300 has 8")):
        chosen(deploy, Setup(engine={"gpus": 16}))


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (Setup(engine={"checkpoints": "hub"}), "checkpoints is hub, the target a directory"),
        (Setup(args=spec(speculative_model="/models/x")), "speculative_model /models/x"),
    ],
)
def test_models_that_were_not_checked(deploy: Deploy, setup: Setup, says: str) -> None:
    found = checked(deploy, setup)["models-as-checked"]
    assert (found.result, says in found.found) == ("error", True)


def test_the_environment(deploy: Deploy) -> None:
    loud = {**BINDING, "TRTLLM_ENABLE_PDL": "1"}
    silent = {**loud, "TRTLLM_NO_USAGE_STATS": "1"}
    assert env_vars(Context(*deploy(Setup()))) == {**silent, "NCCL_GRAPH_REGISTER": "0"}
    assert env_vars(Context(*deploy(Setup(engine={"gpus": 1})))) == silent
    args = {"telemetry_config": {"disabled": False}}  # reporting is allowed
    context = Context(*deploy(Setup(engine={"gpus": 1}, args=args)))
    assert env_vars(context) == loud


def rendered() -> str:
    checks = ["| check | severity | what it does |", "|---|---|---|"]
    for check in ALL_CHECKS:
        assert check.look.__doc__
        first = check.look.__doc__.strip().split("\n\n")[0]
        checks.append(f"| `{check.name}` | {check.severity} | {' '.join(first.split())} |")
    return "\n".join(checks)


def test_the_documented_table_is_this() -> None:
    document = (Path(__file__).parents[2] / "docs" / "tensorrt_llm.md").read_text()
    assert f"\n\n{rendered()}\n\n" in document
