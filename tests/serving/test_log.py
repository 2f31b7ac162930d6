"""What a server's processes say: the form of its lines, requests in them, where the log stays."""

import hashlib
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
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.errors import ServerError
from dflash_trt.serving.http import Phase, ServeState
from dflash_trt.serving.http.access import Access
from dflash_trt.serving.http.connections import Connections
from dflash_trt.serving.http.guard import Guard
from dflash_trt.serving.http.state import State
from dflash_trt.serving.log import Formatter, Log, LogFormat
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.security import OWN_KEY_HEADER, Security
from dflash_trt.serving.supervisor.process import Server
from dflash_trt.serving.tracing import HEADER
from tests.support.request_tools import tensors
from tests.support.servers import serve_command, serve_ports, serving

WAIT = 60.0
ASK = {"text_input": "def main():", "max_tokens": 4}


def test_a_line_has_its_time_and_its_request() -> None:
    record = logging.LogRecord("dflash_trt.front", logging.WARNING, "", 1, "a\nb", None, None)
    record.request_id = "r1"
    time, _, rest = Formatter().format(record).partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", time)
    assert rest == "WARNING dflash_trt.front: a\nb [r1]"


def test_the_last_lines_say_why_a_process_ended(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.add("before")
    start = log.count()
    subprocess.run(["echo", "it failed"], stdout=log.fileno(), check=True)
    assert [event.message for event in log.since(start)] == ["it failed"]
    assert [event.message for event in log.since(0)] == ["before", "it failed"]
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        "INFO serve: before",
        "INFO output: it failed",
    ]


PRINTED = r"""
I1128 06:32:13.106178 11075 server.cc:674] "\n+--+\n"
I1128 06:32:13.106178 11075 http_server.cc:4755] "Started HTTPService at 127.0.0.1:8000"
E1128 06:32:13.106178 11075 model.cc:9] "failed to load 'a' version 1: Internal: no\n\nAt:\n  x"
+------+------+
| Name | what |
W1128 06:32:13.106178 11075 a.cc:1] plain
Segmentation fault
{"time": "t", "level": "INFO", "logger": "dflash_trt.x", "message": "our\nown", "request_id": "r"}
{"time": "no event"}
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_lines_of_all_processes_have_one_form(tmp_path: Path, form: LogFormat) -> None:
    log = Log(tmp_path / "log", form, "0123456789ab")
    log.add("starting")
    subprocess.run(["cat"], input=PRINTED.encode(), stdout=log.fileno(), check=True)
    log.close()
    text = (tmp_path / "log").read_text()
    if form == "text":
        expected = [
            "INFO serve: starting",
            "INFO triton: Started HTTPService at 127.0.0.1:8000",
            "ERROR triton: failed to load 'a' version 1: Internal: no\n\nAt:\n  x",
            "WARNING triton: plain",
            "INFO output: Segmentation fault",
            "INFO dflash_trt.x: our\nown [r]",
            'INFO output: {"time": "no event"}',
        ]
        assert re.sub(r"^(\S+T\S+|t) (?=INFO|ERR|WARN)", "", text, flags=re.M) == (
            "\n".join(expected) + "\n"
        )
        return
    events = [json.loads(line) for line in text.splitlines()]
    assert {event["build"] for event in events} == {"0123456789ab"}
    assert [(event["level"], event["logger"], event["event"][:8]) for event in events] == [
        ("INFO", "serve", "starting"),
        ("INFO", "triton", "Started "),
        ("ERROR", "triton", "failed t"),
        ("WARNING", "triton", "plain"),
        ("INFO", "output", "Segmenta"),
        ("INFO", "dflash_trt.x", "our\nown"),
        ("INFO", "output", '{"time":'),
    ]
    assert [event.get("request_id") for event in events] == [*[None] * 5, "r", None]


def test_a_process_is_not_held_up_and_no_line_is_lost(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    subprocess.run(["seq", "200000"], stdout=log.fileno(), check=True)
    subprocess.run(["head", "-c", "3000000", "/dev/zero"], stdout=log.fileno(), check=True)
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    numbers = [int(line.rpartition(" ")[2]) for line in lines if line[-1].isdigit()]
    assert numbers == [*range(1, 200_001)]
    assert max(map(len, lines)) < 1_200_000


def test_a_log_that_cannot_be_written_is_named(built: Path, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing" / "log"):
        with pytest.raises(ServerError, match=rf"cannot write the log {file}: .*--log-file"):
            Server(OpenedBuild(built, "none"), free_ports(), Security(), file)


@pytest.mark.parametrize(("phase", "lines"), [("unready", 1), ("ready", 2)])
def test_a_probe_is_logged_if_it_should_have_been_answered(
    caplog: pytest.LogCaptureFixture, phase: Phase, lines: int
) -> None:
    """503 is what a server that is not ready should say, so only the client's request counts."""
    state = State(Connections(1), ServeState(phase))
    failing = JSONResponse({}, 503)
    guard = Guard(failing, state, Access("own", None, frozenset()))
    client = TestClient(guard)
    with caplog.at_level("INFO", "dflash_trt.access"):
        client.get("/v1/models", headers={OWN_KEY_HEADER: "own"})
        client.get("/v1/models")
    assert len(caplog.messages) == state.answers[503] == lines


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


@pytest.mark.models
def test_the_output_can_be_json_alone(built: Path) -> None:
    ports = serve_ports()
    options = ("--log-file=/dev/stdout", "--log-format=json")
    process = subprocess.Popen(
        serve_command(built, ports, *options), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "ready":
            body = {"model": "dflash", "prompt": ""}
            url = f"http://127.0.0.1:{ports.http}/v1/completions"
            httpx.post(url, json=body, headers={HEADER: "r7"}, timeout=WAIT)
            process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0
    assert {"serve", "triton", "dflash_trt.access"} <= {event["logger"] for event in events}
    [access] = [event for event in events if event["logger"] == "dflash_trt.access"]
    assert (access["request_id"], access["level"]) == ("r7", "INFO")
    digest = hashlib.sha256((built / "manifest.json").read_bytes()).hexdigest()
    assert {event["build"] for event in events} == {digest[:12]}
