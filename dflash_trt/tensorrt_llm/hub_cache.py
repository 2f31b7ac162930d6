"""A target that a bundle left on the Hub, where it lies in the Hub's cache."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import INDEX, SINGLE, read_index


def cached_target(name: str, revision: str) -> Path | None:
    """Its folder in the cache, if its weights are there whole."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    def cached(file: str) -> Path | None:
        found = try_to_load_from_cache(name, file, revision=revision)
        return Path(found) if isinstance(found, str) else None

    index = cached(INDEX)
    shards = [cached(shard) for shard in (set(read_index(index).values()) if index else {SINGLE})]
    return shards[0].parent if shards[0] and all(shards) else None


def with_cached_target(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM(...)`, with the cached folder for the Hub's id where there is one.

    TensorRT-LLM looks an id up itself: it would fetch gpt-oss's further copies of its weights, or
    without a network refuse a cache that lacks them (huggingface_hub 1.22 and later). On several
    machines each finds its own.
    """
    found = dict(args)
    if "revision" in found and "gpus_per_node" not in found:
        folder = cached_target(found["model"], found["revision"])
        if folder is not None:
            del found["revision"]
            found["model"] = str(folder)
    return found
