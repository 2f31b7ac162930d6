"""Clients of others, as they come from PyPI, over the OpenAI front of `dflash-trt serve`.

Each has an environment of its own in build/clients, made once: it needs the network then.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports
from tests.support.chat_pair import build_chat_pair
from tests.support.commands import program
from tests.support.request_tools import metric
from tests.support.servers import serve_ports, serving

pytestmark = pytest.mark.soak
TESTS = Path(__file__).parents[1] / "support"
PROMPT = "def main():"
COUNTERS = (
    "dflash_requests_total",
    "dflash_acceptance_length_count",
    "dflash_inter_token_latency_seconds_sum",
    "trtllm_generation_tokens_total",
    "trtllm_prompt_tokens_total",
    "trtllm_spec_decode_num_draft_tokens_total",
    "trtllm_time_to_first_token_seconds_sum",
)
# telemetry and what else would call home are off
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "LANGSMITH_TRACING": "false"}


def environment(requirement: str) -> Path:
    home = TESTS.parents[1] / "build" / "clients" / requirement
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", requirement], check=True)
        (home / "complete").touch()
    return home / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_pair(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[tuple[Ports, str]]:
    """Start `dflash-trt serve`; return its ports and the address of the OpenAI API."""
    ports = serve_ports()
    port = ports.http
    with serving(built, ports):
        with Client(f"127.0.0.1:{ports.grpc}") as client:
            client.generate(PROMPT, max_tokens=2)  # after what is measured at the start
        yield ports, f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("requirement", "script"),
    [
        ("langchain-openai==1.7.3", "use_langchain.py"),
        ("langchain-openai==1.7.3", "use_langchain_tools.py"),
        ("openai-agents==0.24.0", "use_agents.py"),
        ("pydantic-ai-slim[openai]==2.68.0", "use_pydantic_ai.py"),
        ("litellm==1.110.2", "use_litellm.py"),
    ],
)
def test_a_client(server: tuple[Ports, str], built: Path, requirement: str, script: str) -> None:
    ports, url = server
    with Client(f"127.0.0.1:{ports.grpc}") as client:
        text = client.generate(PROMPT, max_tokens=24).text
    ids = Tokenizer.from_file(str(built / "tokenizer" / "tokenizer.json")).encode(PROMPT).ids
    arguments = [f"{url}/v1", PROMPT, text, json.dumps(ids)]
    python = environment(requirement) / "python"
    done = program(python, TESTS / "clients" / script, *arguments, timeout=600, **ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]


AI_SDK = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7")


@pytest.mark.skipif(shutil.which("npm") is None, reason="the AI SDK needs Node.js")
def test_vercels_ai_sdk(server: tuple[Ports, str]) -> None:
    _, url = server
    home = TESTS.parents[1] / "build" / "clients" / "ai-sdk"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", home, *AI_SDK], check=True)
        (home / "complete").touch()
    script = shutil.copy(TESTS / "clients" / "use_ai_sdk.mjs", home)
    done = program("node", script, f"{url}/v1", timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="AIPerf needs Python 3.11")
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(server: tuple[Ports, str], built: Path, endpoint: str, tmp_path: Path) -> None:
    ports, url = server
    requests, tokens = 30, 40
    per_chunk = ["--per-chunk-usage"] if endpoint == "chat" else []
    time.sleep(3)  # the metrics are sent once a second
    before = _counted(ports)
    done = subprocess.run(
        [
            environment("aiperf==0.13.0") / "aiperf",
            *f"profile -m pycode --url {url} --endpoint-type {endpoint} --streaming".split(),
            *f"--tokenizer {built / 'tokenizer'} --random-seed 1 --isl 60 --osl {tokens}".split(),
            *f"--request-count {requests} --concurrency 3 --artifact-dir {tmp_path}".split(),
            *["--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true"],
            *["--use-server-token-count", *per_chunk, "--ui", "none", "--no-gpu-telemetry"],
        ],
        # offline it takes no folder for a tokenizer; of a folder nothing is fetched
        env=os.environ | {x: v for x, v in ENVIRONMENT.items() if x != "HF_HUB_OFFLINE"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [file] = tmp_path.rglob("profile_export_aiperf.json")
    report: dict[str, Any] = json.loads(file.read_text())
    figures = {name: value for name, value in report.items() if isinstance(value, dict)}
    said = {name: value["avg"] for name, value in figures.items() if "avg" in value}
    deadline, probes, counted = time.monotonic() + 30, 0.0, -1.0
    while counted != requests * tokens and time.monotonic() < deadline:
        time.sleep(1)
        got = {name: value - before[name] for name, value in _counted(ports).items()}
        # of one token each: `serve` asks whether the server still answers
        probes = got["dflash_requests_total"] - requests
        counted = got["trtllm_generation_tokens_total"] - probes
    assert (said["request_count"], said["request_error_rate"]) == (requests, 0)
    assert said["total_output_tokens"] == counted == requests * tokens
    assert said["total_usage_prompt_tokens"] == got["trtllm_prompt_tokens_total"] - probes
    assert said["total_spec_decode_steps"] == got["dflash_acceptance_length_count"]
    assert said["total_draft_tokens"] == got["trtllm_spec_decode_num_draft_tokens_total"]
    # seconds; it hears of a token later than the server has it, by what a busy machine takes
    first = got["trtllm_time_to_first_token_seconds_sum"] / got["dflash_requests_total"]
    assert first / 2 < said["time_to_first_token"] / 1000 < first + 5
    between = got["dflash_inter_token_latency_seconds_sum"] / (requests * (tokens - 1))
    assert between / 2 < said["inter_token_latency"] / 1000 < 2 * between + 0.1


def _counted(ports: Ports) -> dict[str, float]:
    return {name: sum(metric(ports.metrics, name).values()) for name in COUNTERS}
