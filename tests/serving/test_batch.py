"""`batch`: every line once, through kills and busy servers; a stand-in answers as OpenAI does."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.serving import batch
from dflash_trt.serving.batch import read_requests
from dflash_trt.serving.ports import Ports
from tests.support.commands import run
from tests.support.servers import ROOT

MAIN = "import sys; from dflash_trt.cli.main import main; sys.exit(main())"


class Api(http.server.ThreadingHTTPServer):
    """Follows https://platform.openai.com/docs/api-reference/completions for three routes.

    Fails on another route, and counts requests by custom text. `busy`: refusals still to come.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked = Counter[str]()
        self.running = self.most = self.busy = self.failing = 0
        self.seconds = 0.0
        self.together: threading.Barrier | None = None  # requests that wait for each other
        self.slots: int | None = 3
        self.key: str | None = None
        self.content: bytes | None = None  # of each answer
        self.retry_after = "0"
        self.lock = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Api

    def do_GET(self) -> None:
        assert self.path == "/page/server", self.path
        self.answer(200, {"slots": self.server.slots} if self.server.slots else {})

    def do_POST(self) -> None:
        server = self.server
        assert self.path in batch.URLS, self.path
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        shown = self.headers.get("authorization", "").removeprefix("Bearer ")
        if server.key not in (None, shown):
            return self.answer(401, {"error": {"message": "key"}})
        with server.lock:
            server.running += 1
            server.most = max(server.most, server.running)
            busy, server.busy = server.busy > 0, server.busy - 1
            failing, server.failing = server.failing > 0, server.failing - 1
        time.sleep(server.seconds)
        if server.together is not None:
            server.together.wait(60)
        with server.lock:
            server.running -= 1
        if busy:
            return self.answer(503, {"error": {"message": "full"}})
        if failing:
            return self.answer(500, {"error": {"message": "failed"}})
        server.asked[body.get("prompt", "")] += 1
        if "prompt" not in body:
            return self.answer(400, {"error": {"message": "Missing required parameter: 'prompt'."}})
        self.answer(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 2}})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = self.server.content or json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Request-ID", "r-1")
        self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(batch, "PAUSES", (0.01, 0.05))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # which nobody may use here
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": f"p{number}"}
    url = "/v1/completions"
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body} | fields


def write(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return file


def answers(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def test_each_line_is_answered_once(api: Api, tmp_path: Path) -> None:
    file = write(tmp_path / "in", [line(number) for number in range(50)])
    api.busy = 5
    code, out, _ = run("batch", file, tmp_path / "out", "--url", api.url, "--json")
    done = json.loads(out)
    assert code == 0
    assert done["seconds"] > 0
    assert done == {
        **{"requests": 50, "before": 0, "answered": 50, "failed": 0, "tokens": 100},
        "seconds": done["seconds"],
    }
    assert sorted(each["custom_id"] for each in answers(tmp_path / "out")) == sorted(
        f"id-{number}" for number in range(50)
    )
    assert set(api.asked.values()) == {1}
    first = answers(tmp_path / "out")[0]
    assert first.keys() == {"id", "custom_id", "response", "error"}
    assert first["error"] is None
    assert first["response"].keys() == {"status_code", "request_id", "body"}
    assert (first["response"]["status_code"], first["response"]["request_id"]) == (200, "r-1")
    assert run("batch", file, tmp_path / "out", "--url", "http://127.0.0.1:9").code == 0


@pytest.mark.parametrize(("slots", "options", "most"), [(3, [], 6), (3, ["--concurrency", "2"], 2)])
def test_as_many_run_as_the_server_has_room_for(
    api: Api, tmp_path: Path, slots: int, options: list[str], most: int
) -> None:
    api.slots, api.together = slots, threading.Barrier(most)
    file = write(tmp_path / "in", [line(number) for number in range(4 * most)])
    assert run("batch", file, tmp_path / "out", "--url", api.url, *options).code == 0
    assert api.most == most


def test_an_error_is_a_line(api: Api, tmp_path: Path) -> None:
    wrong = line(1, body={"model": "m"})
    file = write(tmp_path / "in", [line(0), wrong, line(2)])
    code, out, err = run("batch", file, tmp_path / "out", "--url", api.url)
    assert code == 1
    assert out.startswith("2 of 3 requests answered, 1 failed; ")
    assert err.endswith("error: 1 requests failed; their lines say why.\n")
    (failed,) = (each for each in answers(tmp_path / "out") if each["custom_id"] == "id-1")
    assert failed["response"]["status_code"] == 400
    assert "'prompt'" in failed["response"]["body"]["error"]["message"]
    before = dict(api.asked)
    assert run("batch", file, tmp_path / "out", "--url", api.url).code == 1
    assert api.asked == before


def test_a_server_that_fails_is_asked_thrice(api: Api, tmp_path: Path) -> None:
    file = write(tmp_path / "in", [line(0)])
    api.failing = 2
    assert run("batch", file, tmp_path / "a", "--url", api.url).code == 0
    api.failing = 3
    assert run("batch", file, tmp_path / "b", "--url", api.url).code == 1
    (failed,) = answers(tmp_path / "b")
    assert failed["response"]["status_code"] == 500


def test_a_server_that_is_away_ends_it_and_leaves_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PATIENCE", 0.1)
    file = write(tmp_path / "in", [line(0)])
    code, _, err = run("batch", file, tmp_path / "out", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "run the same command again: it continues" in err
    assert (tmp_path / "out").read_bytes() == b""


def test_a_key(api: Api, tmp_path: Path) -> None:
    api.key = "0123456789abcdef"
    file = write(tmp_path / "in", [line(0)])
    code, _, err = run("batch", file, tmp_path / "out", "--url", api.url)
    assert (code, "wants another key" in err) == (1, True)
    (tmp_path / "key").write_text(f"{api.key}\n")
    key = ["--key-file", tmp_path / "key"]
    assert run("batch", file, tmp_path / "out", "--url", api.url, *key).code == 0


def test_a_killed_batch_continues(api: Api, tmp_path: Path) -> None:
    """Killed three times, and once in the middle of a line."""
    count = 120
    file = write(tmp_path / "in", [line(number) for number in range(count)])
    out = tmp_path / "out"
    api.seconds = 0.03
    command = [sys.executable, "-c", MAIN, "batch", file, out, "--url", api.url]
    for kill_at in (20, 50, 80):
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < kill_at:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    whole = out.read_bytes()
    os.truncate(out, len(whole) - 7)
    assert run("batch", file, out, "--url", api.url).code == 0
    done = Counter(each["custom_id"] for each in answers(out))
    assert done == {f"id-{number}": 1 for number in range(count)}


def test_two_batches_do_not_share_a_file(api: Api, tmp_path: Path) -> None:
    file = write(tmp_path / "in", [line(0)])
    with batch.open_answers(tmp_path / "out"):
        code, _, err = run("batch", file, tmp_path / "out", "--url", api.url)
    assert (code, "another batch writes" in err) == (1, True)
    write(tmp_path / "other", [line(7)])
    assert run("batch", file, tmp_path / "out", "--url", api.url).code == 0
    code, _, err = run("batch", tmp_path / "other", tmp_path / "out", "--url", api.url)
    assert (code, "has an answer to 'id-0'" in err) == (1, True)
    (tmp_path / "text").write_text("a letter\n")
    code, _, err = run("batch", file, tmp_path / "text", "--url", api.url)
    assert (code, "is no answer of a batch" in err) == (1, True)
    assert (tmp_path / "text").read_text() == "a letter\n"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("x", "line 2 of {file}: The body is not the JSON object"),
        ({}, "line 2 of {file} has no custom_id"),
        (line(0), "custom_id 'id-0' is there twice"),
        (line(1, custom_id=""), "has no custom_id"),
        (line(1, method="GET"), "method and url are 'GET'"),
        (line(1, url="/v1/embeddings"), "'/v1/embeddings'"),
        (line(1, body="x"), "has no body"),
        (line(1, body={"stream": True}), "stream is true"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_sent(
    api: Api, tmp_path: Path, wrong: Any, problem: str
) -> None:
    file = write(tmp_path / "in", [line(0), wrong])
    code, _, err = run("batch", file, tmp_path / "out", "--url", api.url)
    assert (code, problem.format(file=file) in err) == (1, True), err
    assert not api.asked
    assert not (tmp_path / "out").exists()


def test_a_file_without_requests_and_one_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "text").write_text("{\n")
    for name, problem in (
        ("empty", "holds no"),
        ("text", "text: The body is not"),
        ("no", "cannot"),
    ):
        code, _, err = run("batch", tmp_path / name, tmp_path / "out")
        assert (code, problem in err) == (1, True), err
    file = write(tmp_path / "in", [line(0)])
    assert [each.custom_id for each in read_requests(file)] == ["id-0"]


def test_a_real_server_answers_all_three_routes(url: str, triton: Ports, tmp_path: Path) -> None:
    chat = {"model": "pycode", "messages": [{"role": "user", "content": "def"}], "max_tokens": 4}
    response = {"model": "pycode", "input": "def", "max_output_tokens": 4}
    lines = [
        line(0, body={"model": "pycode", "prompt": "def main():", "max_tokens": 4}),
        line(1, url="/v1/chat/completions", body=chat),
        line(2, url="/v1/responses", body=response),
        line(3, body={"model": "none", "prompt": "x"}),
    ]
    file = write(tmp_path / "in", lines)
    code, out, _ = run("batch", file, tmp_path / "out", "--url", url, "--json")
    done = json.loads(out)
    assert (code, done["answered"], done["failed"]) == (1, 3, 1)
    assert done["tokens"] > 0
    statuses = {
        each["custom_id"]: each["response"]["status_code"] for each in answers(tmp_path / "out")
    }
    assert statuses == {"id-0": 200, "id-1": 200, "id-2": 200, "id-3": 404}


HEAD = '{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"model": "m"'


@pytest.mark.parametrize(
    "wrong",
    [
        HEAD + r', "prompt": "a\ud83d"}}',
        HEAD + r', "a\ud83d": 1}}',
        HEAD + r', "prompt": ["a", {"b": ["\ude00"]}]}}',
        HEAD + ', "temperature": NaN}}',
        HEAD + ', "temperature": -Infinity}}',
        HEAD + ', "temperature": 1e999}}',
        HEAD + ', "stop": [[-1e400]]}}',
        HEAD + ', "seed": ' + "9" * 5000 + "}}",
        HEAD + ', "prompt": ' + "[" * 200 + "]" * 200 + "}}",
        HEAD.replace("bad", r"bad\udc00") + "}}",
        HEAD + "}}}",
    ],
    ids=lambda text: text[len(HEAD) :][:20],
)
def test_what_cannot_be_sent_is_refused_by_its_line(api: Api, tmp_path: Path, wrong: str) -> None:
    good = [json.dumps(line(number)) for number in range(6)]
    file = tmp_path / "in"
    file.write_text("\n".join([*good[:3], wrong, *good[3:]]) + "\n")
    code, _, err = run("batch", file, tmp_path / "out", "--url", api.url)
    assert (code, err.startswith(f"error: line 4 of {file}")) == (1, True), err
    assert not api.asked
    assert not (tmp_path / "out").exists()


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "LONGEST", 1000)
    code, _, err = run("batch", "/dev/zero", tmp_path / "out")
    assert (code, "line 1 of /dev/zero has more than" in err) == (1, True), err


def batch_program(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "batch", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, text=True, timeout=60, **options)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize("path", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1", "link"])
def test_answers_go_to_a_pipe(api: Api, tmp_path: Path, path: str) -> None:
    """What the command prints itself does not come among them."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    file = write(tmp_path / "in", [line(number) for number in range(6)])
    done = batch_program(file, tmp_path / path, "--url", api.url, **PIPES)
    assert done.returncode == 0, done.stderr
    assert len([json.loads(text)["custom_id"] for text in done.stdout.splitlines()]) == 6
    assert "6 of 6 requests answered" in done.stderr


def test_answers_go_to_a_socket_and_to_a_file_that_the_shell_opened(
    api: Api, tmp_path: Path
) -> None:
    file = write(tmp_path / "in", [line(number) for number in range(6)])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = batch_program(
            *(file, "/dev/stdout", "--url", api.url), stdout=theirs, stderr=subprocess.PIPE
        )
        assert done.returncode == 0, done.stderr
        assert ours.recv(2**16).count(b"\n") == 6
    with (tmp_path / "out").open("w") as out:
        done = batch_program(
            *(file, "/dev/stdout", "--url", api.url), stdout=out, stderr=subprocess.STDOUT
        )
    assert done.returncode == 0
    text = (tmp_path / "out").read_text()
    assert sum(row.startswith('{"id": "batch_req_') for row in text.splitlines()) == 6
    assert "6 of 6 requests answered" in text


def test_answers_go_to_a_named_pipe(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, fifo = write(tmp_path / "in", [line(0)]), tmp_path / "fifo"
    os.mkfifo(fifo)
    with (tmp_path / "out").open("w") as out, subprocess.Popen(["cat", fifo], stdout=out) as reader:
        assert run("batch", file, fifo, "--url", api.url).code == 0
        assert reader.wait(60) == 0
    assert len(answers(tmp_path / "out")) == 1
    monkeypatch.setattr(batch, "READER_TIME", 0.1)
    code, _, err = run("batch", file, fifo, "--url", api.url)
    assert (code, f"nobody reads the pipe {fifo}" in err) == (1, True)


def test_devices_and_what_cannot_be_written(api: Api, tmp_path: Path) -> None:
    file = write(tmp_path / "in", [line(0)])
    assert run("batch", file, "/dev/null", "--url", api.url).code == 0
    listening = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
        for path in ("/dev/full", tmp_path, tmp_path / "none" / "out", listening):
            code, _, err = run("batch", file, path, "--url", api.url)
            assert (code, f"error: cannot write {path}: " in err) == (1, True), err


def test_a_reader_that_leaves_is_named(api: Api, tmp_path: Path) -> None:
    file = write(tmp_path / "in", [line(0)])
    reading, writing = os.pipe()
    os.close(reading)
    done = batch_program(
        *(file, "/dev/stdout", "--url", api.url), stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert done.returncode == 1
    assert "error: cannot write /dev/stdout: Broken pipe." in done.stderr


def test_requests_are_never_written_to(api: Api, tmp_path: Path) -> None:
    """By no other name of the file, and not where the two were confused."""
    file = write(tmp_path / "in", [line(0), line(1)])
    other = write(tmp_path / "other", [line(0), line(1)])
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "hard").hardlink_to(file)
    (tmp_path / "one").write_text(json.dumps(line(0)))
    (tmp_path / "begun").write_text('{"id": "an object"')
    write(tmp_path / "error", [{"custom_id": "id-0", "response": None, "error": None}])
    names = ("in", "link", "hard", "../" + tmp_path.name + "/in", "other", "one", "begun", "error")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    for name in names:
        code, _, err = run("batch", file, tmp_path / name, "--url", api.url)
        assert code == 1, name
        assert "Give another file for the answers" in err
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    with file.open() as stdin:
        done = batch_program("/dev/stdin", file, "--url", api.url, stdin=stdin, **PIPES)
    assert (done.returncode, "is the file of the requests" in done.stderr) == (1, True)
    assert run("batch", file, tmp_path / "out", "--url", api.url).code == 0
    whole = (tmp_path / "out").read_bytes()
    code, _, err = run("batch", tmp_path / "out", file, "--url", api.url)
    assert (code, "line 1 of" in err) == (1, True)
    assert (tmp_path / "out").read_bytes() == whole
    assert other.read_bytes() == before["other"]


@pytest.mark.parametrize(
    "content", [b'{"a": "\\ud83d"}', b'{"a": NaN}', b"[1]", b"text", b"[" * 5000, b"\xff"]
)
def test_an_answer_that_no_line_can_hold_is_an_error_line(
    api: Api, tmp_path: Path, content: bytes
) -> None:
    api.content = content
    file = write(tmp_path / "in", [line(0), line(1)])
    assert run("batch", file, tmp_path / "out", "--url", api.url).code == 1
    for answer in answers(tmp_path / "out"):
        assert answer["response"] is None
        assert answer["error"]["code"] == "invalid_response"
    assert run("batch", file, tmp_path / "out", "--url", api.url).code == 1
    assert len(answers(tmp_path / "out")) == 2


@pytest.mark.parametrize("seconds", ["Wed, 21 Oct 2015 07:28:00 GMT", "nan", "0", "-1"])
def test_whenever_a_busy_server_wants_to_be_asked(api: Api, tmp_path: Path, seconds: str) -> None:
    api.busy, api.retry_after = 1, seconds
    file = write(tmp_path / "in", [line(0)])
    assert run("batch", file, tmp_path / "out", "--url", api.url).code == 0
