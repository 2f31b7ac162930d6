"""Known faults of TensorRT-LLM 1.4.0rc1 by GPU and feature, from public threads.

`build` looks them up for the machine that it builds for, `doctor` on the machine that is there.
"""

from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from dflash_trt.checkpoints.checks import Found
from dflash_trt.tensorrt_llm.schema import LlmArgs


class Fault(NamedTuple):
    """What happens, what to do, and which arguments, compute capabilities and target it touches."""

    fault: str
    seen: str  # when it was reported or published
    link: str
    fix: str
    touches: Callable[[LlmArgs, Collection[int], str], bool]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


UPSTREAM = "https://github.com/NVIDIA/TensorRT-LLM"
FAULTS = (
    Fault(
        "requests are dropped under capacity_scheduler_policy MAX_UTILIZATION",
        "2026-07",
        f"{UPSTREAM}/issues/16827",
        "Leave engine.args.scheduler_config.capacity_scheduler_policy out",
        lambda args, sm, target: (
            args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION"
        ),
    ),
    Fault(
        "a KV cache connector may hang when rejected drafts give back a block (open)",
        "2026-07-15",
        f"{UPSTREAM}/issues/16448",
        "Leave kv_connector_config out",
        lambda args, sm, target: args.kv_connector_config is not None,
    ),
    Fault(
        "JSON by a schema may never end with Qwen3 models",
        "2026-10-22",
        f"{UPSTREAM}/releases/tag/v1.4.0rc1",
        "See that every request has a max_tokens",
        lambda args, sm, target: (
            args.guided_decoding_backend is not None and target.startswith("Qwen3")
        ),
    ),
    Fault(
        "TRTLLM attention, which the drafter's is, hangs on SM103 with FlashInfer 0.6.7",
        "2026-04-01",
        "https://github.com/flashinfer-ai/flashinfer/issues/2939",
        "Run: pip install 'flashinfer-python!=0.6.7', as TensorRT-LLM's own requirements allow it",
        lambda args, sm, target: (
            103 in sm
            and args.value("speculative_config.attention_backend") == "TRTLLM"
            and _installed("flashinfer-python") == "0.6.7"  # `doctor` alone sees it
        ),
    ),
)


def look_up(args: LlmArgs, sm: Collection[int], architecture: str) -> Found:
    """Return whether a known fault touches these arguments, on GPUs of these capabilities."""
    found = [fault for fault in FAULTS if fault.touches(args, sm, architecture)]
    if not found:
        return Found(True, f"none of {len(FAULTS)} known faults of TensorRT-LLM touches it")
    what = "; ".join(f"{fault.fault} ({fault.link}, {fault.seen})" for fault in found)
    return Found(False, what, "; ".join(fault.fix for fault in found))
