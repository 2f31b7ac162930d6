"""What a server's processes say: the form of its lines, requests in them, where the log stays."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpcclient
from live import serve_command
from load import tensors

from dflash_trt.errors import ServerError
from dflash_trt.serving.log import Formatter, Log, Said
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.request_id import HEADER
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.process import Server

WAIT = 60.0
ASK = {"text_input": "def main():", "max_tokens": 4}
TRITON = "I1123 21:43:10.123456 42 server.cc:604] Started"
FAILED = "E1123 21:43:10.123456 42 model.cc:7] failed"


def lines_of(log: Log, said: str) -> list[str]:
    """What the log makes of the output of a process."""
    source = Said(log, "triton")
    with source.end() as end:
        os.write(end, said.encode())
    assert source.last() == said.splitlines()
    return log.path.read_text().splitlines()


def test_every_line_is_a_json_object(tmp_path: Path) -> None:
    """Triton's, what goes on over lines, a library's, and our own with its request."""
    record = logging.LogRecord("dflash_trt.front", logging.WARNING, "", 1, "a\nb", None, None)
    record.request_id = "r1"
    ours = Formatter("json").format(record)
    said = "\n".join([TRITON, FAILED, "  at line 3", ours, "{no json", '{"time": 1}'])
    found = [json.loads(line) for line in lines_of(Log(tmp_path / "log", "json"), said)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+[+-]\d\d:\d\d", x.pop("time")) for x in found)
    assert found[:4] == [
        {"level": "INFO", "logger": "triton", "message": "server.cc:604] Started"},
        {"level": "ERROR", "logger": "triton", "message": "model.cc:7] failed"},
        {"level": "ERROR", "logger": "triton", "message": "  at line 3"},
        {"level": "WARNING", "logger": "dflash_trt.front", "message": "a\nb", "request_id": "r1"},
    ]
    assert [each["message"] for each in found[4:]] == ["{no json", '{"time": 1}']


def test_text_has_time_and_level_too(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.add("INFO", "access", "GET / 200", ms=1, request_id="r1")
    lines = lines_of(log, f"{FAILED}\n")
    assert [line.partition(" ")[2] for line in lines] == [
        "INFO access: GET / 200 [r1]",
        "ERROR triton: model.cc:7] failed",
    ]


def test_a_log_that_cannot_be_written_is_named(built: Path, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing" / "log"):
        with pytest.raises(ServerError, match=rf"cannot write the log {file}: .*--log-file"):
            Server(built, free_ports(), Security(), file)


def test_a_request_is_followed_through_all_processes(built: Path, tmp_path: Path) -> None:
    """`serve --log-format json`: every line of the log and of the output is an object; a request
    has its id in the answer, in the access line, and in the model's line when it is refused."""
    ports, openai, file = free_ports(), free_ports().http, tmp_path / "log"
    options = (f"--log-file={file}", "--log-format=json")
    process = subprocess.Popen(
        serve_command(built, ports, *options), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        said = [json.loads(process.stdout.readline())["message"] for _ in range(2)]
        assert said[0] == f"starting Triton (log: {file}) ..."
        assert said[1].startswith("ready\n")
        v2, v1 = f"http://127.0.0.1:{ports.http}/v2/models", f"http://127.0.0.1:{openai}/v1"
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
        httpx.get(f"http://127.0.0.1:{openai}/health")
        for metadata, own in (({HEADER: "by-grpc"}, ""), ({}, "own")):
            with grpcclient.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
                inputs = tensors({"text_input": "a", "max_tokens": -1})
                with pytest.raises(grpcclient.InferenceServerException):
                    client.infer("dflash_infer", inputs, request_id=own, headers=metadata)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"triton", "serve", "dflash_trt.access"} <= {line["logger"] for line in lines}
    of_access = [line for line in lines if line["logger"] == "dflash_trt.access"]
    found = {line["request_id"]: (line["path"], line["status"]) for line in of_access}
    paths = {name: ("/" + url.split("/", 3)[3], code) for name, (url, _, code) in asked.items()}
    assert found == paths
    assert all(line["method"] == "POST" and line["ms"] > 0 for line in of_access)
    refused = [line for line in lines if "refused" in line["message"]]
    assert {x["request_id"] for x in refused} == {"refused", "plain", "wrong", "by-grpc", "own"}


def test_the_log_stays_when_serve_has_ended(built: Path) -> None:
    process = subprocess.Popen(
        serve_command(built, free_ports()), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    file = Path(first.partition("(log: ")[2].partition(")")[0])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT)
    assert [each.name for each in file.parent.iterdir()] == ["server.log"]
    assert f" INFO serve: starting Triton (log: {file}) ..." in file.read_text()
    file.unlink()
    file.parent.rmdir()


def test_it_can_all_go_to_the_output(built: Path) -> None:
    """For a container: one stream of objects, each once."""
    options = ("--log-file=/dev/stdout", "--log-format=json")
    process = subprocess.Popen(
        serve_command(built, free_ports(), *options), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    messages: list[str] = []
    while not any(message.startswith("ready") for message in messages):
        messages.append(json.loads(process.stdout.readline())["message"])
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=WAIT)
    messages += [json.loads(line)["message"] for line in rest.splitlines()]
    assert sum(message.startswith(("starting Triton", "stopping")) for message in messages) == 2
    assert any("Started HTTPService" in message for message in messages)
