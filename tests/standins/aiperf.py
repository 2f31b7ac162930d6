"""`aiperf profile` as AIPerf 0.13 does it, for what `bench matrix` asks: anything else is refused.

Options and the export's fields are those of a real run of `aiperf profile` 0.13.0 over `serve`;
what is here sends the same requests in the same order and counts what comes back. Of requests that
fail it says so as AIPerf does: `error_summary`, or exit code 1 and no export where all of them did.
"""

import argparse
import json
import os
import statistics
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for option in ("model-names", "url", "input-file", "tokenizer", "artifact-dir"):
        parser.add_argument(f"--{option}", required=True)
    for option in ("concurrency", "warmup-request-count", "request-count"):
        parser.add_argument(f"--{option}", required=True, type=int)
    parser.add_argument("--endpoint-type", required=True, choices=PATHS)
    parser.add_argument("--custom-dataset-type", required=True, choices=["inputs_json"])
    parser.add_argument("--dataset-sampling-strategy", required=True, choices=["sequential"])
    parser.add_argument("--ui", required=True, choices=["none"])
    for flag in ("streaming", "use-server-token-count", "per-chunk-usage"):
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in ("no-gpu-telemetry", "no-server-metrics"):
        parser.add_argument(f"--{flag}", action="store_true", required=True)
    assert sys.argv[1] == "profile"
    asked = parser.parse_args(sys.argv[2:])
    assert asked.streaming
    assert asked.use_server_token_count
    if asked.per_chunk_usage and asked.endpoint_type != "chat":
        sys.exit("--per-chunk-usage requires endpoint type 'chat'")
    # as it is offline, a folder is no tokenizer
    assert not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & os.environ.keys()
    assert (Path(asked.tokenizer) / "tokenizer.json").is_file()
    sessions = json.loads(Path(asked.input_file).read_text())["data"]
    assert len({each["session_id"] for each in sessions}) == len(sessions)
    payloads = [payload for each in sessions for payload in each["payloads"]]
    warm, count = asked.warmup_request_count, asked.request_count
    assert len(payloads) == warm + count
    assert all(payload["model"] == asked.model_names for payload in payloads)
    url = asked.url + PATHS[asked.endpoint_type]
    with ThreadPoolExecutor(asked.concurrency) as users:
        [*users.map(lambda payload: ask(url, payload), payloads[:warm])]
        start = time.perf_counter()
        answers = [*users.map(lambda payload: ask(url, payload), payloads[warm:])]
        seconds = time.perf_counter() - start
    good = [each for each in answers if "error" not in each]
    if not good:
        print(f"All {count} inference request(s) failed.")
        return 1
    tokens = sum(each["tokens"] for each in good)
    export: dict[str, Any] = {
        "schema_version": "1.4",
        "aiperf_version": "0.13.0",
        "was_cancelled": False,
        "is_complete": True,
        "error_summary": [
            {"error_details": {"code": 400, "message": each["error"]}, "count": 1}
            for each in answers
            if "error" in each
        ],
        "request_count": {"unit": "requests", "avg": float(len(good))},
        "output_token_throughput": {"unit": "tokens/sec", "avg": tokens / seconds},
        "output_token_throughput_per_user": spread(
            "tokens/sec/user",
            [(x["tokens"] - 1) / max(x["seconds"] - x["first"], 1e-6) for x in good],
        ),
        "time_to_first_token": spread("ms", [1e3 * x["first"] for x in good]),
    }
    if steps := sum(each["steps"] for each in good):
        accepted = sum(each["accepted"] for each in good)
        name = "spec_decode_token_weighted_acceptance_length"
        export[name] = {"unit": "ratio", "avg": 1 + accepted / steps}
    (Path(asked.artifact_dir) / "profile_export_aiperf.json").write_text(json.dumps(export))
    return 0


def spread(unit: str, values: list[float]) -> dict[str, Any]:
    return {"unit": unit, "p50": statistics.median(values), "p99": max(values)}


def ask(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(payload).encode(), headers)
    start, first, usage, metrics = time.perf_counter(), 0.0, {}, {}
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    usage = chunk.get("usage") or usage
                    metrics = (chunk.get("metrics") or {}).get("speculative_decoding") or metrics
                    if not first and chunk["choices"]:
                        first = time.perf_counter() - start
    except urllib.error.HTTPError as error:
        return {"error": error.read().decode()}
    return {
        "tokens": usage["completion_tokens"],
        "seconds": time.perf_counter() - start,
        "first": first,
        "steps": metrics.get("num_spec_steps", 0),
        "accepted": metrics.get("num_accepted_draft_tokens", 0),
    }


if __name__ == "__main__":
    sys.exit(main())
