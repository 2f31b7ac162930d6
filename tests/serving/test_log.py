"""What a server's processes say: the form of its lines, requests in them, where the log stays."""

import logging
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpcclient
from live import serve_command, serve_ports, serving
from load import tensors

from dflash_trt.build.opened import OpenedBuild
from dflash_trt.errors import ServerError
from dflash_trt.serving.log import Formatter, Log
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.process import Server
from dflash_trt.serving.tracing import HEADER

WAIT = 60.0
ASK = {"text_input": "def main():", "max_tokens": 4}


def test_a_line_has_its_time_and_its_request() -> None:
    record = logging.LogRecord("dflash_trt.front", logging.WARNING, "", 1, "a\nb", None, None)
    record.request_id = "r1"
    time, _, rest = Formatter().format(record).partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", time)
    assert rest == "WARNING dflash_trt.front: a\nb [r1]"


def test_the_last_lines_say_why_a_process_ended(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.add("before")
    start = log.size()
    subprocess.run(["echo", "it failed"], stdout=log.fileno(), check=True)
    assert log.since(start) == ["it failed"]
    assert log.since(0)[0].endswith("INFO serve: before")
    assert Log(Path("/dev/null")).since(0) == []


def test_a_log_that_cannot_be_written_is_named(built: Path, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing" / "log"):
        with pytest.raises(ServerError, match=rf"cannot write the log {file}: .*--log-file"):
            Server(OpenedBuild(built, "none"), free_ports(), Security(), file)


@pytest.mark.models
def test_a_request_is_followed_through_all_processes(built: Path, tmp_path: Path) -> None:
    """Its id is in the answer, the access line and the model's line if refused."""
    ports, file = serve_ports(), tmp_path / "log"
    with serving(built, ports, f"--log-file={file}") as (process, said):
        assert f"starting Triton (log: {file}) ..." in said
        v2, v1 = f"http://127.0.0.1:{ports.http}/v2/models", f"http://127.0.0.1:{ports.http}/v1"
        # path, body, status
        asked: dict[str, tuple[str, Any, int]] = {
            "generate": (f"{v2}/dflash/generate", ASK, 200),
            "refused": (f"{v2}/dflash/generate", ASK | {"max_tokens": -1}, 400),
            "plain": (f"{v2}/dflash_infer/generate", ASK | {"max_tokens": -1}, 400),
            "chat": (f"{v1}/completions", {"model": "dflash", "prompt": "a", "top_k": 0}, 200),
            "wrong": (f"{v1}/completions", {"model": "dflash", "prompt": ""}, 400),
            "nowhere": (f"{v1}/nowhere", {}, 404),
        }
        for name, (url, body, status) in asked.items():
            answer = httpx.post(url, json=body, headers={HEADER: name}, timeout=WAIT)
            assert (answer.status_code, answer.headers[HEADER]) == (status, name), answer.text
        httpx.get(f"http://127.0.0.1:{ports.http}/health")
        for metadata, own in (({HEADER: "by-grpc"}, ""), ({}, "own")):
            with grpcclient.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
                inputs = tensors({"text_input": "a", "max_tokens": -1})
                with pytest.raises(grpcclient.InferenceServerException):
                    client.infer("dflash_infer", inputs, request_id=own, headers=metadata)
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT)
    text = file.read_text()
    found = re.findall(r" INFO dflash_trt.access: POST (\S+) (\d+) [\d.]+ ms \[(.*)\]", text)
    paths = {name: ("/" + url.split("/", 3)[3], code) for name, (url, _, code) in asked.items()}
    assert {name: (path, int(status)) for path, status, name in found} == paths
    refused = re.findall(r" refused: \w+ \[(.*)\]", text)
    assert {*refused} == {"refused", "plain", "wrong", "by-grpc", "own"}


@pytest.mark.models
def test_the_log_stays_when_serve_has_ended(built: Path) -> None:
    process = subprocess.Popen(
        serve_command(built, free_ports()), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    file = Path(process.stdout.readline().partition("(log: ")[2].partition(")")[0])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT)
    assert [each.name for each in file.parent.iterdir()] == ["server.log"]
    assert f" INFO serve: starting Triton (log: {file}) ..." in file.read_text()
    file.unlink()
    file.parent.rmdir()


@pytest.mark.models
def test_it_can_all_go_to_the_output(built: Path) -> None:
    with serving(built, free_ports(), "--log-file=/dev/stdout") as (process, said):
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=WAIT)
    assert sum(said.count(line) + rest.count(line) for line in ("starting Tr", "stopping")) == 2
    assert "Started HTTPService" in said
