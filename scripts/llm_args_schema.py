"""Print how TensorRT-LLM's own schema of `LLM(...)` differs from the one that we check with.

    python scripts/llm_args_schema.py PUBLISHED.json   trtllm-serve-config.schema.json of a release
    python scripts/llm_args_schema.py                  the class, where TensorRT-LLM is installed

A release's is at nvidia.github.io/TensorRT-LLM/RELEASE/_static/schemas, and in the repository in
tensorrt_llm/schemas. Both are shortened first (`shortened`), to the form of ours.
"""

import difflib
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_trt.tensorrt_llm.schema import DECODING_TYPES

FILE = files("dflash_trt.tensorrt_llm").joinpath("llm_args.schema.json")
SAYS_NOTHING = {"title", "description", "status", "telemetry", "deprecated", "$comment", "$schema",
                "$id", "discriminator", "format"}  # fmt: skip
# of `trtllm-serve`, not of LLM(...), and another name of speculative_model
LEFT_OUT = {"allow_request_chat_template", "disagg_cluster", "hf_revision",
            "internal_request_auth_key", "_mpi_session", "speculative_model_dir"}  # fmt: skip
NULL = {"type": "null"}


def shortened(published: dict[str, Any]) -> dict[str, Any]:
    """Return what a check looks at: no texts, no classes of drafts that are not ours."""
    defs = published.get("$defs", {})
    properties = _short(published, defs)["properties"]
    properties["speculative_config"] = _of_our_methods(properties["speculative_config"], defs)
    reached: dict[str, Any] = {}
    waiting = [properties]
    while waiting:
        for name in _references(waiting.pop()) - reached.keys():
            reached[name] = _short(defs[name], defs)
            waiting.append(reached[name])
    return {"properties": properties, "$defs": reached}


def _short(node: Any, defs: dict[str, Any]) -> Any:
    """Return a schema without texts, its unions flat and its enumerations in place."""
    if isinstance(node, list):
        return [_short(part, defs) for part in node]
    if not isinstance(node, dict):
        return node
    short = {}
    for key, value in node.items():
        if key == "properties":
            shown = value.keys() - LEFT_OUT
            short[key] = {name: _short(row, defs) for name, row in value.items() if name in shown}
        elif key not in SAYS_NOTHING:
            short[key] = _short(value, defs)
    name = str(short.get("$ref", "")).rpartition("/")[2]
    if name and "properties" not in defs.get(name, {}):
        del short["$ref"]
        return _short(defs[name], defs) | short
    parts = short.pop("oneOf", []) + short.pop("anyOf", [])
    return short | _joined(parts) if parts else short


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a union; of two types, one of which is null, a single schema."""
    flat: list[dict[str, Any]] = []
    for part in parts:
        inner = part.get("anyOf", [part]) if part.keys() == {"anyOf"} else [part]
        flat += [one for one in inner if one not in flat]
    others = [part for part in flat if part != NULL]
    (first, *more) = others
    if more or NULL not in flat or "type" not in first or "properties" in first:
        return {"anyOf": flat} if len(flat) > 1 else flat[0]
    nullable = first | {"type": [first["type"], "null"]}
    return nullable | ({"enum": [*first["enum"], None]} if "enum" in first else {})


def _of_our_methods(row: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    ours = set(DECODING_TYPES.values())
    shown = [
        part
        for part in row["anyOf"]
        if "$ref" not in part
        or defs[part["$ref"].rpartition("/")[2]]["properties"]["decoding_type"]["const"] in ours
    ]
    return row | {"anyOf": shown}


def _references(node: Any) -> set[str]:
    if isinstance(node, list):
        return {name for part in node for name in _references(part)}
    if not isinstance(node, dict):
        return set()
    here = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
    return here | {name for part in node.values() for name in _references(part)}


def rows(node: Any, at: str = "") -> list[str]:
    """Return a line for each value."""
    if isinstance(node, dict):
        parts = [rows(value, f"{at}.{key}") for key, value in sorted(node.items())]
        return [row for part in parts for row in part]
    if isinstance(node, list):
        node = sorted(node, key=str)
    return [f"{at} = {json.dumps(node, sort_keys=True)}"]


def published_schema(argument: str | None) -> tuple[str, dict[str, Any]]:
    """Return a name and the schema of a file, or of the class that is installed."""
    if argument is not None:
        return argument, json.loads(Path(argument).read_text("utf-8"))
    import tensorrt_llm  # noqa: PLC0415
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs  # noqa: PLC0415

    return f"TensorRT-LLM {tensorrt_llm.__version__}", TorchLlmArgs.model_json_schema()


if __name__ == "__main__":
    name, published = published_schema(next(iter(sys.argv[1:]), None))
    ours = json.loads(FILE.read_text("utf-8"))
    both = [rows(shortened(schema)) for schema in (ours, published)]
    print("\n".join(difflib.unified_diff(*both, FILE.name, name, lineterm="", n=0)))
