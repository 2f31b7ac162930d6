"""What a request's text has to follow, as TensorRT-LLM's guided decoding takes it."""

import json
from typing import Any

from dflash_trt.decoding import Grammar
from dflash_trt.errors import RequestError

FIELDS = {"json_schema": "json", "regex": "regex", "lark": "grammar"}  # of `GuidedDecodingParams`
FINAL = "<|start|>assistant<|channel|>final<|message|>"  # what gpt-oss says its answer after


def guide(grammar: Grammar, backend: str | None, *, channels: bool) -> dict[str, Any]:
    """The arguments of `tensorrt_llm.GuidedDecodingParams`.

    backend: `guided_decoding_backend` of the build. channels: the model writes in channels, and
    the grammar is for what it says in the last of them, as `trtllm-serve` does it
    (`_response_format_to_guided_decoding_params` of `tensorrt_llm/serve/openai_protocol.py`).
    Raises RequestError for what the backend cannot follow.
    """
    if backend is None:
        raise RequestError(
            f"{grammar.name} is not possible: this server was built without guided decoding",
            "Send the request without, or build with engine.args.guided_decoding_backend.",
        )
    if grammar.kind == "lark" and backend != "llguidance":
        raise RequestError(
            f"{grammar.name} is in llguidance's language, which this server cannot read",
            "Send a JSON schema or a regular expression, or build with "
            "engine.args.guided_decoding_backend: llguidance.",
        )
    if not channels or grammar.kind == "lark":  # such a grammar has the channels in it
        return {FIELDS[grammar.kind]: grammar.text}
    if backend != "xgrammar":
        raise RequestError(
            f"{grammar.name}: the model answers in channels, and {backend} cannot wait for one",
            "Send a whole grammar, or build with engine.args.guided_decoding_backend: xgrammar.",
        )
    content: dict[str, Any] = {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "json_schema":
        content = {"type": "json_schema", "json_schema": json.loads(grammar.text)}
    tag = {"begin": FINAL, "content": content, "end": ""}
    tags = {"type": "triggered_tags", "triggers": [FINAL], "tags": [tag], "stop_after_first": True}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": tags})}
