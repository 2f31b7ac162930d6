"""TensorRT-LLM's arguments: what the rules choose, and each named check on a config that fails it.

The stand-ins have the fields of the published gpt-oss-120b and its drafter, and files that are a
header over a hole: shapes and sizes, no weights.
"""

from __future__ import annotations

import json
import re
import runpy
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
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
from dflash_trt.roofline import PRESETS, machine
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

TARGET: Fields = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}
DRAFTER: Fields = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 8,
    "hidden_size": 2880,
    "intermediate_size": 7680,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "num_target_layers": 36,
    "attention_bias": True,
    "block_size": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 9, 17, 25, 33]},
}
TARGET_BYTES, DRAFTER_BYTES = 61 * GIB, 1570 << 20
DENSE: Fields = {  # Qwen3-8B, in place of gpt-oss's
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 32,
    "num_local_experts": None,
    "num_experts_per_tok": None,
    "quantization_config": None,
}
TWO_SIDED: Fields = {
    "layer_types": ["sliding_attention"] * 8,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "is_causal": False,
}
SECOND: Fields = {
    **TWO_SIDED,
    "architectures": ["DFlash2DraftModel"],
    "block_size": 8,
    "dflash_config": {
        **DRAFTER["dflash_config"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}


@dataclass(frozen=True)
class Setup:
    """How a deployment differs from gpt-oss-120b on a DGX B300; None takes a field away."""

    engine: Fields = field(default_factory=dict)
    args: Fields = field(default_factory=dict)
    target: Fields = field(default_factory=dict)
    drafter: Fields = field(default_factory=dict)
    target_bytes: int = TARGET_BYTES
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
        tensor = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size // 2 * 2]}
        header = json.dumps({"weights": tensor}).encode()
        header += b" " * (-len(header) % 8)
        with (directory / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + size // 2 * 2)
        return directory

    def make(setup: Setup) -> tuple[BuildConfig, Pair]:
        target = write("target", TARGET, setup.target, setup.target_bytes)
        (target / LINK).unlink(missing_ok=True)
        if setup.target_link:
            (target / LINK).touch()
        drafter = write("drafter", DRAFTER, setup.drafter, DRAFTER_BYTES)
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
        return config, Pair(summarize_target(target), summarize_drafter(drafter))

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
REUSE: Fields = {"serving": {"prefix_cache": "recompute_tail"}}
WINDOWS: Fields = {"layer_types": ["sliding_attention"] * 36, "sliding_window": 128}
HYBRID: Fields = {
    "layer_types": ["linear_attention", "full_attention"] * 18,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
OLD = {"version": "1.3.0rc22"}
# the setup that fails the check, and one as near as can be that does not
CASES: dict[str, tuple[Setup, Setup]] = {
    "hidden-states-captured": (
        Setup(target={"architectures": ["Gemma4ForConditionalGeneration"]}),
        Setup(target={"architectures": ["Qwen3NextForCausalLM"]}),
    ),
    "listed-upstream": (Setup(target={"architectures": ["Qwen3ForCausalLM"]}), Setup()),
    "target-layout": (Setup(target_link=True), Setup()),
    "drafter-layout": (Setup(drafter={"speculators_model_type": "dflash"}), Setup()),
    "drafter-method": (
        Setup(drafter={"dflash_config": {**DRAFTER["dflash_config"], "markov_rank": 256}}),
        Setup(drafter={"dflash_config": {**DRAFTER["dflash_config"], "markov_rank": 0}}),
    ),
    "grouped-drafter-attention": (Setup(drafter={"kv_lora_rank": 512}), Setup()),
    "uniform-drafter-layers": (
        Setup(drafter={"per_layer_config": {"3": {"head_dim": 128}}}),
        Setup(drafter={"per_layer_config": {"3": {"head_dim": 64}}}),
    ),
    "taps-ascending": (
        Setup(drafter={"dflash_config": {"mask_token_id": 1, "target_layer_ids": [9, 1, 17]}}),
        Setup(drafter={"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 9, 17]}}),
    ),
    "first-generation": (Setup(drafter=SECOND), Setup()),
    "values-that-work": (
        Setup(args=graphs(batch_sizes=[])),
        Setup(args=graphs(batch_sizes=[64])),
    ),
    "keys-of-sections": (
        Setup(args={"peft_cache_config": {"host_cache_sise": 1}}),
        Setup(args={"peft_cache_config": {"host_cache_size": 1}}),
    ),
    "generation-of-version": (
        Setup(drafter=SECOND, engine={"version": "1.3.0rc29"}),
        Setup(drafter=SECOND, engine={"version": "1.4.0rc0"}),
    ),
    "windows-of-version": (
        Setup(drafter=TWO_SIDED, engine={"version": "1.3.0rc26"}),
        Setup(drafter=TWO_SIDED),
    ),
    "draft-length": (Setup(args=spec(max_draft_len=10)), Setup(args=spec(max_draft_len=9))),
    "draft-length-as-trained": (
        Setup(args=spec(max_draft_len=4)),
        Setup(config={"speculation": {"draft_tokens": 9}}),
    ),
    "taps-as-stated": (
        Setup(args=spec(target_layer_ids=[2, 10, 18, 26, 34])),
        Setup(args=spec(target_layer_ids=None)),
    ),
    "mask-as-stated": (
        Setup(args=spec(mask_token_id=None), drafter={"mask_token_id": 200000, "dflash_config": {
            "target_layer_ids": [1, 9, 17, 25, 33]}}),
        Setup(args=spec(mask_token_id=None)),
    ),
    "drafter-is-local": (
        Setup(args=spec(speculative_model="z-lab/gpt-oss-120b-DFlash")),
        Setup(args=spec(speculative_model="/models/gpt-oss-120b-DFlash")),
    ),
    "schedule-starts-full": (
        Setup(args=spec(draft_len_schedule={4: 7, 64: 3})),
        Setup(args=spec(draft_len_schedule={4: 9, 64: 3})),
    ),
    "schedule-within-length": (
        Setup(args=spec(draft_len_schedule={4: 9, 64: 12})),
        Setup(args=spec(draft_len_schedule={4: 9, 64: 9})),
    ),
    "schedule-or-concurrency": (
        Setup(args=spec(draft_len_schedule={64: 9}, max_concurrency=64)),
        Setup(args=spec(max_concurrency=64)),
    ),
    "schedule-covers-batch": (
        Setup(args=spec(max_concurrency=32)),
        Setup(args={**spec(max_concurrency=32), "max_batch_size": 32}),
    ),
    "schedule-on-one-rank": (
        Setup(args={**spec(draft_len_schedule={64: 9}), "enable_attention_dp": True}),
        Setup(args=spec(draft_len_schedule={64: 9})),
    ),
    "acceptance-threshold": (
        Setup(args=spec(acceptance_rate_threshold=0.3, acceptance_rate_window_size=100)),
        Setup(args=spec(acceptance_rate_window_size=0)),
    ),
    "forced-acceptance": (
        Setup(args={"env_overrides": {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "5"}}),
        Setup(args={"env_overrides": {"TLLM_LOG_LEVEL": "INFO"}}),
    ),
    "weights-fit": (
        Setup(engine={"hardware": "hgx-h100", "gpus": 1}, target_bytes=75 * GIB),
        Setup(engine={"hardware": "hgx-h100", "gpus": 1}, target_bytes=71 * GIB),
    ),
    "dense-context": (
        Setup(engine=H200, args={"max_batch_size": 80}),
        Setup(engine=H200, args={"max_batch_size": 64}),
    ),
    "concurrency-met": (
        Setup(engine={**H200, "concurrency": 256}),
        Setup(engine={**H200, "concurrency": 256}, config={"serving": {"max_seq_len": 16384}}),
    ),
    "memory-fraction": (
        Setup(engine=H200, args=kv(free_gpu_memory_fraction=0.85)),
        Setup(args=kv(free_gpu_memory_fraction=0.85)),
    ),
    "tokens-of-a-step": (
        Setup(args={"max_num_tokens": 639}),
        Setup(args={"max_num_tokens": 640}),
    ),
    "long-prompts": (
        Setup(args={"enable_chunked_prefill": False}),
        Setup(args={"enable_chunked_prefill": False, "max_num_tokens": 131072}),
    ),
    "sequence-length-stated": (Setup(args={"max_seq_len": None}), Setup()),
    "target-positions": (
        Setup(args={"max_seq_len": 131073}, drafter={"max_position_embeddings": 262144}),
        Setup(args={"max_seq_len": 131072}),
    ),
    "drafter-positions": (
        Setup(args={"max_seq_len": 65536}, drafter={"max_position_embeddings": 32768}),
        Setup(drafter={"max_position_embeddings": 32768}),
    ),
    "block-reuse": (
        Setup(args=kv(enable_block_reuse=True)),
        Setup(args=kv(enable_block_reuse=False)),
    ),
    "reuse-of-version": (
        Setup(config=REUSE, engine={"version": "1.4.0rc0"}),
        Setup(config=REUSE),
    ),
    "reuse-with-tail": (
        Setup(config=REUSE, args=spec(context_recompute_tail=-1)),
        Setup(config=REUSE, args=spec(context_recompute_tail=100)),
    ),
    "tail-without-reuse": (
        Setup(args=spec(context_recompute_tail=128)),
        Setup(args={**spec(context_recompute_tail=128), **kv(enable_block_reuse=True)}),
    ),
    "tail-of-manager": (
        Setup(config=REUSE, args=kv(use_kv_cache_manager_v2=False), target=WINDOWS),
        Setup(config=REUSE, args=kv(use_kv_cache_manager_v2=False)),
    ),
    "reuse-of-states": (
        Setup(config=REUSE, target=HYBRID),
        Setup(
            config=REUSE,
            target=HYBRID,
            args=kv(mamba_state_config={"periodic_snapshot_interval": 1024}),
        ),
    ),
    "reuse-by-rank": (
        Setup(config=REUSE, args={"enable_attention_dp": True}),
        Setup(
            config=REUSE,
            args={
                "enable_attention_dp": True,
                "attention_dp_config": {"enable_kv_cache_aware_routing": True},
            },
        ),
    ),
    "cache-type-of-pool": (
        Setup(args=kv(dtype="fp8")),
        Setup(args=kv(dtype="fp8"), engine=H200),
    ),
    "no-pipeline": (Setup(args={"pipeline_parallel_size": 2}), Setup()),
    "no-context-parallel": (Setup(args={"context_parallel_size": 2}), Setup()),
    "ranks-on-machine": (
        Setup(args={"tensor_parallel_size": 16}),
        Setup(args={"tensor_parallel_size": 8}),
    ),
    "no-idle-gpus": (
        Setup(args={"tensor_parallel_size": 4}),
        Setup(args={"tensor_parallel_size": 4}, engine={"gpus": 4}),
    ),
    "nvlink-domain": (
        Setup(engine={"hardware": {**PRESETS["hgx-h200"].__dict__, "nodes": 2}}),
        Setup(engine={"hardware": "gb200-nvl72-slice"}),
    ),
    "heads-divide": (
        Setup(args={"tensor_parallel_size": 6}),
        Setup(engine={"gpus": 6}),
    ),
    "vocabulary-divides": (Setup(target={"vocab_size": 201089}), Setup()),
    "experts-divide": (
        Setup(args={"moe_expert_parallel_size": 3}),
        Setup(args={"moe_expert_parallel_size": 4, "moe_tensor_parallel_size": 2}),
    ),
    "attention-data-parallel": (
        Setup(target=DENSE, args={"enable_attention_dp": True}),
        Setup(args={"enable_attention_dp": True}),
    ),
    "drafter-attention": (
        Setup(engine=H200, args=spec(attention_backend="TRTLLM")),
        Setup(engine=H200, args=spec(attention_backend="FA4")),
    ),
    "drafter-windows": (
        Setup(drafter=TWO_SIDED, args=spec(attention_backend="TRTLLM")),
        Setup(drafter=TWO_SIDED),
    ),
    "drafter-attention-paged": (
        Setup(args=spec(attention_backend="VANILLA")),
        Setup(engine=H200, args=spec(attention_backend="VANILLA")),
    ),
    "paged-attention-shapes": (
        Setup(args=kv(tokens_per_block=128)),
        Setup(args=kv(tokens_per_block=64)),
    ),
    "flash-attention-wheel": (Setup(engine=H200), Setup()),
    "target-attention": (
        Setup(args={"attn_backend": "FLASHINFER"}),
        Setup(args={"attn_backend": "TRTLLM"}),
    ),
    "expert-kernels": (
        Setup(engine=H200, args={"moe_config": {"backend": "TRTLLM"}}),
        Setup(engine=H200, args={"moe_config": {"backend": "TRITON"}}),
    ),
    "expert-kernels-fast": (
        Setup(args={"moe_config": {"backend": "CUTLASS"}}),
        Setup(args={"moe_config": {"backend": "TRTLLM"}}),
    ),
    "cache-type": (
        Setup(engine=H200, args=kv(dtype="nvfp4")),
        Setup(args=kv(dtype="nvfp4")),
    ),
    "graphs-on": (Setup(args={"cuda_graph_config": None}), Setup(args=graphs())),
    "graphs-padded": (
        Setup(args=graphs(enable_padding=False)),
        Setup(args={**graphs(enable_padding=False), **spec(draft_len_schedule={64: 9})}),
    ),
    "graph-sizes-agree": (
        Setup(args=graphs(batch_sizes=[1, 64], max_batch_size=32)),
        Setup(args=graphs(batch_sizes=[1, 64], max_batch_size=64)),
    ),
    "graphs-cover-batch": (
        Setup(args=graphs(batch_sizes=[1, 2, 4])),
        Setup(args={**graphs(batch_sizes=[1, 2, 4]), "max_batch_size": 4}),
    ),
    "overlap": (Setup(args={"disable_overlap_scheduler": True}), Setup()),
    "rejection-with-guided": (
        Setup(args={**spec(use_rejection_sampling=True), "guided_decoding_backend": "xgrammar"}),
        Setup(args={"guided_decoding_backend": "xgrammar"}),
    ),
    "guided-of-version": (
        Setup(args={"guided_decoding_backend": "xgrammar"}, engine={"version": "1.4.0rc0"}),
        Setup(args={"guided_decoding_backend": "xgrammar"}),
    ),
    "guided-of-channels": (
        Setup(args={"guided_decoding_backend": "llguidance"}),
        Setup(args={"guided_decoding_backend": "llguidance"}, target=DENSE),
    ),
    "guided-drafts": (Setup(args={"guided_decoding_backend": "xgrammar"}), Setup()),
    "sampled-requests": (Setup(), Setup(args=spec(use_rejection_sampling=True))),
    "penalties": (Setup(), Setup(args=spec(enable_penalty=True))),
    "logits-processors": (Setup(args={"batched_logits_processor": "x"}), Setup()),
    "lora": (Setup(args={"enable_lora": True}), Setup()),
    "scheduler-policy": (
        Setup(args={"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}),
        Setup(args={"scheduler_config": {"waiting_queue_policy": "priority"}}),
    ),
    "one-server": (Setup(args={"cache_transceiver_config": {"backend": "NIXL"}}), Setup()),
    "real-weights": (Setup(args={"load_format": "dummy"}), Setup(args={"load_format": "AUTO"})),
    "no-remote-code": (Setup(args={"trust_remote_code": True}), Setup()),
    "acceptance-metrics": (Setup(args={"return_perf_metrics": False}), Setup()),
    "acceptance-per-request": (Setup(engine={"version": "1.3.0rc26"}), Setup()),
    "faults-known": (
        Setup(engine={"version": "1.3.0rc24"}),
        Setup(engine={"version": "1.3.0rc24", "gpus": 1}),
    ),
    "hub-target": (
        Setup(engine={"checkpoints": "hub"}),
        Setup(engine={"checkpoints": "hub"}, config={"target": {"hub": "a/b", "revision": "c"}}),
    ),
    "target-as-checked": (Setup(args={"model": "openai/gpt-oss-20b"}), Setup()),
    "deprecated-arguments": (
        Setup(args=kv(sink_token_length=4)),
        Setup(args=kv(tokens_per_block=64)),
    ),
    "unstable-arguments": (
        Setup(args={"enable_iter_req_stats": True}),
        Setup(args={"stream_interval": 2}),
    ),
}  # fmt: skip
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


REFUSED: dict[str, tuple[Setup, str, str]] = {
    "known-arguments": (
        Setup(args=kv(enable_blok_reuse=True)),
        "engine.args.kv_cache_config.enable_blok_reuse is no argument of KvCacheConfig",
        "enable_block_reuse",
    ),
    "arguments-of-version": (
        Setup(args=spec(context_recompute_tail=64), engine={"version": "1.3.0rc27"}),
        "context_recompute_tail is known from TensorRT-LLM 1.4.0rc1 on",
        "1.4.0rc1",
    ),
    "argument-types": (
        Setup(args={"max_batch_size": "64"}),
        "engine.args.max_batch_size is '64'",
        "1.4.0rc1",
    ),
    "speculation-on": (
        Setup(args={"speculative_config": None}),
        "turns speculation off",
        "DFlashDecodingConfig",
    ),
}


@pytest.mark.parametrize("check", REFUSED)
def test_wrong_arguments_are_refused_by_name(deploy: Deploy, check: str) -> None:
    setup, problem, fix = REFUSED[check]
    found = checked(deploy, setup)["refused"]
    assert problem in found.found
    assert fix in found.fix
    assert checked(deploy, Setup())[check].result == "passed"


@pytest.mark.parametrize(
    ("args", "version", "known"),
    [
        (spec(attention_backend="FA4"), "1.3.0rc26", False),
        (spec(attention_backend="VANILLA"), "1.3.0rc26", False),
        ({"moe_config": {"backend": "CUTEDSL_FC12"}}, "1.3.0rc29", False),
        ({"moe_config": {"backend": "CUTEDSL_FC12"}}, "1.4.0rc1", True),
        ({"iter_perf_stats_interval": 10}, "1.4.0rc0", False),
        (spec(decoding_type="Eagle3"), "1.4.0rc1", False),
        (spec(draft_len_schedule={0: 9}), "1.4.0rc1", False),
        (spec(max_concurrency=0), "1.4.0rc1", False),
        (kv(free_gpu_memory_fraction=1.5), "1.4.0rc1", False),
        ({"tensor_parallel_size": 0}, "1.4.0rc1", False),
        ({"sampler_type": "TorchSampler"}, "1.3.0rc22", False),
    ],
)
def test_what_the_versions_take(deploy: Deploy, args: Fields, version: str, known: bool) -> None:
    found = checked(deploy, Setup(args=args, engine={"version": version}))
    assert ("refused" not in found) == known


# refused by upstream's classes, or by nobody until it is too late
WRONG: list[Fields] = [
    spec(draft_len_schedule={}),
    spec(max_total_draft_tokens=3),
    kv(free_gpu_memory_fraction=None),
    kv(max_attention_window=[0]),
    kv(disk_cache_size=1),
    kv(pool_ratio=[0.5, 0.4]),
    kv(pool_ratio=[]),
    kv(block_reuse_config={"polici": "per_request"}),
    {"telemetry_config": {"off": True}},
    {"enable_lm_head_tp_in_adp": True},
    {"moe_cluster_parallel_size": 3},
    {"moe_expert_parallel_size": 0},
    {"moe_expert_parallel_size": 3},
    {"moe_tensor_parallel_size": -2},
    {
        "torch_compile_config": {"capture_num_tokens": [8]},
        "prefill_capture_num_tokens": [8],
    },
    {"prefill_cuda_graph_backend": "breakable", "enable_lora": True},
    {"attention_dp_config": {"timeout_iters": -1}},
    {"moe_config": {"load_balancer": "/nowhere.yaml"}},
    {"max_beam_width": 4},
    {"encode_only": True},
    {"mm_encoder_only": True},
    {"gpus_per_node": 0},
    {"attn_backend": "TRTLM"},
    {"skip_tokenizer_init": True},
    graphs(batch_sizes=[]),
    spec(advanced_sampling_mode="no_topp"),
    {"num_postprocess_workers": 2},
    {"orchestrator_type": "ray"},
]


@pytest.mark.parametrize("args", WRONG, ids=str)
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
    assert set(names) == CASES.keys() | REFUSED.keys()
    assert {check.name for check in ARGUMENT_CHECKS} == REFUSED.keys()
    assert all(check.look.__doc__ for check in ALL_CHECKS)


def test_the_headline_pair_has_nothing_to_find_fault_with(deploy: Deploy) -> None:
    found = checked(deploy, Setup())
    assert {n: f.result for n, f in found.items() if f.result != "passed"} == USUAL


def test_the_dense_context_is_upstreams_arithmetic(deploy: Deploy) -> None:
    """8 layers, keys and values of one KV head of 64 in bf16 on each of eight GPUs."""
    found = checked(deploy, CASES["dense-context"][0])["dense-context"]
    slot = 2 * 8 * (131072 + 10) * 1 * 64 * 2
    budget = int((143771 * (1 << 20) - TARGET_BYTES // 8 - 4 * GIB) * (1 - 0.8) * 0.7)
    for figure in (81 * slot / GIB, budget / GIB):
        assert f"{figure:.2f} GiB" in found.found
    fits = budget // slot - 1
    assert found.fix == f"Set max_batch_size to at most {fits}"
    assert chosen(deploy, Setup(engine={**H200, "concurrency": 999})).max_batch_size == fits
    # with attention-DP each rank has all eight KV heads
    alone = Setup(engine={**H200, "objective": "throughput", "concurrency": 999})
    assert chosen(deploy, alone).max_batch_size == budget // (8 * slot) - 1


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            {"objective": "latency"},
            {
                "tensor_parallel_size": 8,
                "moe_expert_parallel_size": 1,
                "moe_config.backend": "TRTLLM",
                "max_batch_size": 8,
                "max_num_tokens": 8192,
                "max_seq_len": 131072,
                "enable_chunked_prefill": True,
                "kv_cache_config.free_gpu_memory_fraction": 0.85,
                "speculative_config.max_draft_len": 9,
                "speculative_config.attention_backend": "TRTLLM",
                "cuda_graph_config.batch_sizes": [1, 2, 4, 8],
            },
        ),
        (
            {"objective": "throughput", "concurrency": 720},
            {
                "enable_attention_dp": True,
                "attention_dp_config.batching_wait_iters": 50,
                "moe_expert_parallel_size": 8,
                "max_batch_size": 90,
                "max_num_tokens": 16384,
                "stream_interval": 20,
                "cuda_graph_config.batch_sizes": [1, 2, 4, *range(8, 65, 8), 80, 90],
            },
        ),
        (
            {"hardware": "hgx-h200", "gpus": 4},
            {
                "tensor_parallel_size": 4,
                "moe_config.backend": "TRITON",
                "kv_cache_config.free_gpu_memory_fraction": 0.8,
                "speculative_config.attention_backend": "VANILLA",
            },
        ),
        ({"hardware": "gb200-nvl72-slice"}, {"tensor_parallel_size": 8, "gpus_per_node": 4}),
        ({"gpus": 6}, {"tensor_parallel_size": 4}),
        ({"gpus": 1}, {"tensor_parallel_size": 1, "moe_expert_parallel_size": None}),
    ],
)
def test_what_the_rules_choose(deploy: Deploy, engine: Fields, expected: Fields) -> None:
    values = chosen(deploy, Setup(engine=engine)).model_dump()
    assert {path: at(values, path) for path in expected} == expected


def at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = None if values is None else values[part]
    return values


QWEN: Fields = {**DENSE, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}


def dense(**changes: Any) -> Setup:
    """A target as wide as Qwen3-8B on one B300, and a drafter with a block of 16."""
    engine = {"gpus": 1, "concurrency": 256} | changes.pop("engine", {})
    drafter = {"block_size": 16, "hidden_size": 4096, "num_attention_heads": 32}
    return Setup(
        target=QWEN,
        drafter=drafter,
        engine=engine,
        target_bytes=16 * GIB,
        **changes,
    )


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
            again = llm_args_class().model_validate(yaml.safe_load(args.to_yaml()))
            assert again.model_dump(exclude_unset=True) == args.to_dict()
            errors = [f for f in check_args(made, pair, preset, args) if f.result == "error"]
            assert errors == []


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.argument)
def test_every_rule_can_be_overridden(deploy: Deploy, rule: Rule) -> None:
    """With what it would choose, or upstream's default; the source says who chose it."""
    own = at(chosen(deploy, Setup()).typed.model_dump(), rule.argument)
    value = Values()[rule.argument] if own is None else own
    *sections, last = rule.argument.split(".")
    args: Fields = {last: value}
    for section in reversed(sections):
        args = {section: args}
    made = chosen(deploy, Setup(args=args))
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
