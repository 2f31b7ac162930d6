"""`engine.json` and `llm_args.yaml` of a bundle, for whatever runs it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dflash_trt.engines import ENGINE_FILE
from dflash_trt.errors import EngineError
from dflash_trt.files import EXACT, MAX_YAML, Size, compose_yaml, parse_yaml, read_as, read_text

KIND = "tensorrt_llm"
ARGS_FILE = "llm_args.yaml"


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """A bundle and the machine it was made for; others may run it."""

    __pydantic_config__: ClassVar = EXACT

    kind: str
    version: str  # of TensorRT-LLM
    machine: str
    gpu: str
    sm: int  # compute capability of the GPUs: 90, 100, 103
    memory_bytes: int  # per GPU
    gpus: Size  # per node, for one instance
    nodes: Size
    architecture: str = ""  # of the target
    environment: dict[str, str]
    lowest: float = 0.0  # lowest plausible acceptance length; 0: nothing is published
    lowest_by: str = ""


def write_info(engine: Path, info: BundleInfo) -> None:
    (engine / ENGINE_FILE).write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")


def read_info(engine: Path) -> BundleInfo:
    """Read `engine.json`; EngineError if missing or damaged."""
    path = engine / ENGINE_FILE
    try:
        return read_as(path, BundleInfo)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path} is not an engine description ({error})", "Run `dflash-trt build` again"
        ) from error


def read_llm_args(engine: Path) -> dict[str, Any]:
    """Return the arguments of `tensorrt_llm.LLM`, with absolute paths into the bundle."""
    path = engine / ARGS_FILE
    try:
        args: dict[str, Any] = parse_yaml(compose_yaml(read_text(path, MAX_YAML)))
        drafter = args.get("speculative_config") or {}
        if "revision" not in args:
            args["model"] = str(engine.resolve() / args["model"])
        if drafter.get("speculative_model"):
            drafter["speculative_model"] = str(engine.resolve() / drafter["speculative_model"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise EngineError(
            f"{path} does not hold the arguments of an LLM ({error})",
            "Run `dflash-trt build` again",
        ) from error
    return args


def with_local_target(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with a local folder for a target on the Hub, downloaded if needed.

    By id TensorRT-LLM would also download gpt-oss's other copies of its weights. With several
    machines each resolves the id itself.
    """
    if "revision" not in args or "gpus_per_node" in args:
        return dict(args)
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    left_out = ["original/*", "metal/*"]
    local = {name: value for name, value in args.items() if name != "revision"}
    local["model"] = snapshot_download(
        args["model"], revision=args["revision"], ignore_patterns=left_out
    )
    return local
