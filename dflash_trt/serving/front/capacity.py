"""What a build can hold at once, as `serve` says it."""

from pathlib import Path

from dflash_trt.build import read_manifest
from dflash_trt.engines import EngineInfo, read_infos, roles
from dflash_trt.files import size_of
from dflash_trt.serving.front.llm import limits
from dflash_trt.tensorrt_llm import KIND, read_llm_args


def capacity(directory: Path, cores: int) -> str:
    """Slots, context length, sizes of caches and weights, and threads of a built directory.

    cores: that its engines may take. EngineError or BuildError where an engine's description is
    damaged.
    """
    engines = directory / "engines"
    if (engines / KIND).is_dir():
        known = limits(read_llm_args(engines / KIND))
        return (
            f"{known['slots']} slots of up to {known['max_seq_len']} tokens; TensorRT-LLM's log "
            "says what memory its KV caches take"
        )
    target, *others = read_infos(engines)
    threads = target.threads or cores
    size = sum(map(_cache_bytes, (target, *others)))
    weights = sum(map(size_of, roles(engines)))
    kept = read_manifest(directory)["config"]["serving"].get("prefix_cache") or 0
    return (
        f"{target.slots} slots of up to {target.max_seq_len} tokens, KV caches of "
        f"{size / 1e6:.1f} MB, prefix cache of at most {kept} MiB, weights of "
        f"{weights / 1e6:.1f} MB on disk, {threads} thread{'s' * (threads != 1)} an engine"
    )


def _cache_bytes(info: EngineInfo) -> int:
    """Keys and values of all slots."""
    return info.token_bytes * info.slots * info.cache_len
