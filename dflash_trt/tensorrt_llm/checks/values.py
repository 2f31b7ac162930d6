"""Values that have the right type, and that `LLM(...)` refuses all the same, drops, or breaks on.

A row: the argument, whether its value is wrong, why, and what to do. Upstream's own validators are
in `tensorrt_llm/llmapi/llm_args.py@00043967`.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.checks import Found
from dflash_trt.tensorrt_llm.case import Case
from dflash_trt.tensorrt_llm.chosen import LlmArgs
from dflash_trt.tensorrt_llm.schema.sections import BY_ALGORITHM, KEYS, known_keys

Wrong = Callable[[Any, LlmArgs], bool]
LEAVE = "Leave it out"


def _is(*values: object) -> Wrong:
    return lambda value, args: value in values


def _other_than(*values: object) -> Wrong:
    return lambda value, args: value not in values


def _no_size(value: Any, args: LlmArgs) -> bool:
    return value is not None and value != -1 and value < 1  # -1 is upstream's for not given


WRONG: tuple[tuple[str, Wrong, str, str], ...] = (
    # refused by upstream
    (
        "enable_lm_head_tp_in_adp",
        lambda value, args: value and not args.enable_attention_dp,
        "it needs attention-DP",
        "Set enable_attention_dp, too, or leave it out",
    ),
    ("moe_expert_parallel_size", _no_size, "that is no number of ranks", LEAVE),
    ("moe_tensor_parallel_size", _no_size, "that is no number of ranks", LEAVE),
    (
        "moe_cluster_parallel_size",
        _other_than(None, -1, 1),
        "clusters of experts are deprecated, and must divide the ranks",
        LEAVE,
    ),
    (
        "kv_cache_config.disk_cache_size",
        lambda value, args: bool(value) and not args.kv_cache_config.disk_cache_path,
        "there is no disk_cache_path",
        "Give kv_cache_config.disk_cache_path, too, or leave it out",
    ),
    (
        "kv_cache_config.pool_ratio",
        lambda value, args: (
            value is not None and not (min(value, default=0) > 0 and math.isclose(sum(value), 1))
        ),
        "its parts must be above 0 and sum to 1",
        "Correct them, or leave it out",
    ),
    (
        "prefill_capture_num_tokens",
        lambda value, args: (
            value is not None
            and args.torch_compile_config is not None
            and args.torch_compile_config.capture_num_tokens is not None
        ),
        "torch_compile_config.capture_num_tokens says the same",
        "Give one of the two",
    ),
    (
        "prefill_cuda_graph_backend",
        lambda value, args: value == "breakable" and args.enable_lora,
        "such graphs are not for LoRA",
        "Leave it out, or enable_lora",
    ),
    (
        "moe_config.load_balancer",
        lambda value, args: isinstance(value, str) and not Path(value).is_file(),
        "there is no such file",
        "Give the content of the file in its place, or a path that is the same on every machine",
    ),
    # refused by nobody until it is too late
    ("max_beam_width", _other_than(1), "with a drafter there is one beam", LEAVE),
    ("encode_only", _is(True), "an encoder generates no text", LEAVE),
    ("mm_encoder_only", _is(True), "an encoder generates no text", LEAVE),
    (
        "attn_backend",
        _other_than("TRTLLM", "FLASHINFER", "VANILLA"),
        "TensorRT-LLM would take another without a word",
        "Use TRTLLM, FLASHINFER or VANILLA, or leave it out",
    ),
    ("skip_tokenizer_init", _is(True), "`doctor` generates with TensorRT-LLM's tokenizer", LEAVE),
    ("cuda_graph_config.batch_sizes", _is([]), "graphs up to a batch of 128 would be made", LEAVE),
    (
        "speculative_config.max_total_draft_tokens",
        lambda value, args: value not in (None, args.speculative_config.max_draft_len),
        "it is overwritten by max_draft_len",
        "Set max_draft_len in its place",
    ),
    (
        "speculative_config.advanced_sampling_mode",
        _other_than("full"),
        "requests with top_k or top_p would be sampled without them, and not be told",
        LEAVE,
    ),
    ("num_postprocess_workers", _other_than(0), "texts are made by our server", LEAVE),
    ("orchestrator_type", _is("ray"), "our server starts the ranks by MPI", LEAVE),
)


def values_that_work(case: Case, args: LlmArgs) -> Found:
    """Upstream refuses, drops or breaks on some values of the right type."""
    for name, wrong, why, fix in WRONG:
        value: Any = args
        for key in name.split("."):
            value = getattr(value, key, None)
        absent = value is None and "." in name  # its section may be null
        if not absent and wrong(value, args):
            return Found(False, f"engine.args.{name} is {value!r}: {why}", fix)
    return Found(True, "no argument has a value that TensorRT-LLM refuses or drops")


def keys_of_sections(case: Case, args: LlmArgs) -> Found:
    """Upstream refuses a key that a section does not have."""
    for name in (*KEYS, *BY_ALGORITHM):
        section: Any = args
        for part in name.split("."):
            section = getattr(section, part)
        if not isinstance(section, Mapping):  # none, or the name of a file
            continue
        known = known_keys(name, section)
        for key in section:
            if key not in known:
                algorithms = BY_ALGORITHM.get(name)
                return Found(
                    False,
                    f"engine.args.{name} has the key {key!r:.60}, which TensorRT-LLM does not know",
                    f"Known there: {', '.join(known)}"
                    if known or algorithms is None
                    else f"Give one of the algorithms {', '.join(algorithms)}",
                )
    return Found(True, "sections have keys that TensorRT-LLM knows")
