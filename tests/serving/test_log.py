"""What a server's processes say: the form of its lines, requests in them, where the log stays."""

import json
import logging
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpcclient
from live import serve_command, serve_ports
from load import tensors

from dflash_trt.errors import ServerError
from dflash_trt.serving.log import Formatter, Log
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.process import Server
from dflash_trt.serving.tracing import HEADER

WAIT = 60.0
ASK = {"text_input": "def main():", "max_tokens": 4}


def test_a_line_is_text_or_a_json_object() -> None:
    """Our own, with its request; `text` has no other fields."""
    record = logging.LogRecord("dflash_trt.front", logging.WARNING, "", 1, "a\nb", None, None)
    record.request_id = "r1"
    record.fields = {"ms": 1}
    line = json.loads(Formatter("json").format(record))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+[+-]\d\d:\d\d", line.pop("time"))
    about = {"level": "WARNING", "logger": "dflash_trt.front", "message": "a\nb"}
    assert line == {**about, "ms": 1, "request_id": "r1"}
    text = Formatter("text").format(record)
    assert text.partition(" ")[2] == "WARNING dflash_trt.front: a\nb [r1]"


def test_the_last_lines_say_why_a_process_ended(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.add("INFO", "serve", "before")
    start = log.size()
    subprocess.run(["echo", "it failed"], stdout=log.fileno(), check=True)
    assert log.since(start) == ["it failed"]
    assert log.since(0)[0].endswith("INFO serve: before")
    assert Log(Path("/dev/null")).since(0) == []


def test_a_log_that_cannot_be_written_is_named(built: Path, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing" / "log"):
        with pytest.raises(ServerError, match=rf"cannot write the log {file}: .*--log-file"):
            Server(built, free_ports(), Security(), file)


@pytest.mark.models
def test_a_request_is_followed_through_all_processes(built: Path, tmp_path: Path) -> None:
    """`serve --log-format json`: our lines of the log and of the output are objects; a request
    has its id in the answer, in the access line, and in the model's line when it is refused."""
    ports, file = serve_ports(), tmp_path / "log"
    options = (f"--log-file={file}", "--log-format=json")
    process = subprocess.Popen(
        serve_command(built, ports, *options), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        said = [json.loads(process.stdout.readline())["message"] for _ in range(2)]
        assert said[0] == f"starting Triton (log: {file}) ..."
        assert said[1].startswith("ready\n")
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
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT)
    text = file.read_text().splitlines()
    lines = [json.loads(line) for line in text if line.startswith("{")]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"serve", "dflash_trt.access"} <= {line["logger"] for line in lines}
    of_access = [line for line in lines if line["logger"] == "dflash_trt.access"]
    found = {line["request_id"]: (line["path"], line["status"]) for line in of_access}
    paths = {name: ("/" + url.split("/", 3)[3], code) for name, (url, _, code) in asked.items()}
    assert found == paths
    assert all(line["method"] == "POST" and line["ms"] > 0 for line in of_access)
    refused = [line for line in lines if "refused" in line["message"]]
    assert {x["request_id"] for x in refused} == {"refused", "plain", "wrong", "by-grpc", "own"}


@pytest.mark.models
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


@pytest.mark.models
def test_it_can_all_go_to_the_output(built: Path) -> None:
    options = ("--log-file=/dev/stdout", "--log-format=json")
    process = subprocess.Popen(
        serve_command(built, free_ports(), *options), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while '"message": "ready' not in lines[-1]:
        assert lines[-1]
        lines.append(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=WAIT)
    lines += rest.splitlines()
    messages = [json.loads(line)["message"] for line in lines if line.startswith("{")]
    assert sum(message.startswith(("starting Triton", "stopping")) for message in messages) == 2
    assert any("Started HTTPService" in line for line in lines)
