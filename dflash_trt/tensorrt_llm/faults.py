"""Known faults of TensorRT-LLM 1.4.0rc1 by GPU and feature, from public threads.

`build` looks them up for the configured machine, `doctor` for the actual one.
"""

from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version

from dflash_trt.checkpoints.findings import Found
from dflash_trt.tensorrt_llm.schema import LlmArgs

UPSTREAM = "https://github.com/NVIDIA/TensorRT-LLM"


def look_up(args: LlmArgs, sm: Collection[int], architecture: str) -> Found:
    """Return whether known faults affect these arguments, on GPUs of these capabilities."""
    found = list(_faults(args, sm, architecture))
    if not found:
        return Found(True, "no known fault of TensorRT-LLM touches it")
    return Found(False, "; ".join(each for each, _ in found), "; ".join(fix for _, fix in found))


def _faults(args: LlmArgs, sm: Collection[int], architecture: str) -> Iterator[tuple[str, str]]:
    """Yield each fault, with link and date, and its fix."""
    if args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION":
        yield (
            f"requests are dropped under MAX_UTILIZATION ({UPSTREAM}/issues/16827, July 2026)",
            "Leave engine.args.scheduler_config.capacity_scheduler_policy out",
        )
        if args.guided_decoding_backend is not None:
            yield (
                "a grammar begins again when MAX_UTILIZATION has a request computed again "
                f"({UPSTREAM}/issues/18891, open, 2026-09-08)",
                "Take GUARANTEED_NO_EVICT, the default",
            )
    drafts = args.value("speculative_config.decoding_type") in ("DFlash", "Eagle3")
    if drafts and args.cache_transceiver_config is not None:
        yield (
            "the drafter's KV cache is not sent from prefill to generation: acceptance is 4 % less "
            f"after short prompts, 25 % after 30,000 tokens ({UPSTREAM}/pull/17371, 2026-08-06)",
            "Leave cache_transceiver_config out",
        )
    if args.kv_connector_config is not None:
        yield (
            "a KV cache connector may hang when rejected drafts give back a block "
            f"({UPSTREAM}/issues/16448, open, 2026-07-15)",
            "Leave kv_connector_config out",
        )
    if args.guided_decoding_backend is not None and architecture.startswith("Qwen3"):
        yield (
            "JSON by a schema may never end with Qwen3 models "
            f"({UPSTREAM}/releases/tag/v1.4.0rc1, 2026-10-22)",
            "See that every request has a max_tokens",
        )
    paged = args.value("speculative_config.attention_backend") == "TRTLLM"
    if paged and 103 in sm and _installed("flashinfer-python") == "0.6.7":  # only for `doctor`
        yield (
            "TRTLLM attention, which the drafter's is, hangs on SM103 with FlashInfer 0.6.7 "
            "(https://github.com/flashinfer-ai/flashinfer/issues/2939, 2026-04-01)",
            "Run: pip install 'flashinfer-python!=0.6.7', as TensorRT-LLM's requirements allow it",
        )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
