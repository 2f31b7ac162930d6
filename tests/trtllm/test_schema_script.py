"""scripts/llm_args_schema.py: the published schema in the form of ours."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from dflash_trt.tensorrt_llm.schema import schema

SCRIPT = Path(__file__).parents[2] / "scripts" / "llm_args_schema.py"
script = runpy.run_path(str(SCRIPT))

TEXT = {"title": "X", "description": "x", "status": "beta", "telemetry": {"exclude": True}}
NULL = {"type": "null"}


def decoding(kind: str) -> dict[str, Any]:
    return {"properties": {"decoding_type": {"const": kind, **TEXT}}, "type": "object", **TEXT}


# a piece of each form that upstream's generator writes (scripts/generate_trtllm_serve_schemas.py)
PUBLISHED = {
    "$id": "https://example.org/x.json",
    "properties": {
        "hf_revision": {"type": "string"},
        "dtype": {"default": "auto", "type": "string", **TEXT},
        "revision": {"anyOf": [{"type": "string"}, NULL], "default": None, **TEXT},
        "tokenizer": {"anyOf": [{"type": "string"}, {"format": "path", "type": "string"}, NULL]},
        "policy": {"$ref": "#/$defs/Policy", "default": "a"},
        "chunking": {"anyOf": [{"$ref": "#/$defs/Policy"}, NULL]},
        "moe_config": {"$ref": "#/$defs/MoeConfig", **TEXT},
        "speculative_config": {
            "anyOf": [
                {
                    "discriminator": {"propertyName": "decoding_type"},
                    "oneOf": [{"$ref": "#/$defs/DFlash"}, {"$ref": "#/$defs/MTP"}],
                },
                NULL,
            ],
            "default": None,
        },
    },
    "$defs": {
        "Policy": {"enum": ["a", "b"], "type": "string", **TEXT},
        "MoeConfig": {"properties": {"status": {"type": "string"}}, "type": "object", **TEXT},
        "DFlash": decoding("DFlash"),
        "MTP": decoding("MTP"),
    },
}
SHORT = {
    "properties": {
        "dtype": {"default": "auto", "type": "string"},
        "revision": {"default": None, "type": ["string", "null"]},
        "tokenizer": {"type": ["string", "null"]},
        "policy": {"default": "a", "enum": ["a", "b"], "type": "string"},
        "chunking": {"enum": ["a", "b", None], "type": ["string", "null"]},
        "moe_config": {"$ref": "#/$defs/MoeConfig"},
        "speculative_config": {"anyOf": [{"$ref": "#/$defs/DFlash"}, NULL], "default": None},
    },
    "$defs": {
        "MoeConfig": {"properties": {"status": {"type": "string"}}, "type": "object"},
        "DFlash": {"properties": {"decoding_type": {"const": "DFlash"}}, "type": "object"},
    },
}


def test_texts_go_and_unions_become_types() -> None:
    assert script["shortened"](PUBLISHED) == SHORT
    assert script["shortened"](SHORT) == SHORT


def test_ours_has_that_form() -> None:
    ours = {part: schema()[part] for part in ("properties", "$defs")}
    assert script["shortened"](schema()) == ours


def test_a_difference_is_printed(tmp_path: Path) -> None:
    other = json.loads(json.dumps(schema()))
    other["$defs"]["KvCacheConfig"]["properties"]["disk_io_threads"] = {"type": "integer"}
    other["properties"]["stream_interval"]["default"] = 2
    (tmp_path / "rc4.json").write_text(json.dumps(other))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "rc4.json")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line for line in lines if line[0] in "+-"][2:] == [
        '+.$defs.KvCacheConfig.properties.disk_io_threads.type = "integer"',
        "-.properties.stream_interval.default = 1",
        "+.properties.stream_interval.default = 2",
    ]
