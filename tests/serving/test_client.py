"""The Python client: against the real server, and against a stand-in for what that cannot do."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from dflash_trt.errors import DeadlineError, RequestError, ServerError, UnavailableError
from dflash_trt.serving.client import GRACE, AsyncClient, Client, Tls, is_this_machine, stream
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.supervisor.run import running_server
from tests.standins import triton_grpc as stand_in
from tests.standins.triton_grpc import aborted, failure, hanging, part, parts
from tests.support.llm_build import standins, write_llm_build
from tests.support.servers import assert_cancelled, assert_goes_idle, cancelled

ROOT = Path(__file__).parents[2]
PROMPT = "def main():"
WAIT = 60.0
FULL = "The request queue is full. Try again later."
# takes long on any machine: it repeats nothing that could be looked up
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 2.0}


@pytest.fixture(
    scope="module", params=["onnxruntime", pytest.param("tensorrt_llm", marks=pytest.mark.models)]
)
def server(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ports]:
    directory = built
    if request.param == "tensorrt_llm":
        args = {"max_batch_size": 4, "max_seq_len": 1024}
        args |= {"speculative_config": {"max_draft_len": 7, "enable_penalty": True}}
        pair = ROOT / "examples" / "pycode"
        directory = write_llm_build(tmp_path_factory.mktemp("llm"), pair, args)
    with standins(), running_server(directory) as ports:
        yield ports


@pytest.fixture(scope="module")
def client(server: Ports) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.grpc}") as client:
        yield client


def test_generate_and_stream_give_the_same_answer(client: Client) -> None:
    whole = client.generate(PROMPT, max_tokens=40)
    [choice] = whole.choices
    chunks = list(client.stream(PROMPT, max_tokens=40))
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == choice.text == whole.text != ""
    assert [token for chunk in chunks for token in chunk.token_ids] == choice.token_ids
    assert [not chunk.finish_reason for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    for end in (choice, chunks[-1]):
        assert (end.finish_reason, end.completion_tokens, end.prompt_tokens) == ("length", 40, 5)
        assert end.rounds > 0 < end.accepted < end.drafted
        assert end.acceptance_length == pytest.approx(39 / end.rounds)
        assert 0 < end.seconds < WAIT
    assert sum(choice.round_tokens) + 1 == 40
    assert len(choice.round_tokens) == choice.rounds


def test_the_asyncio_client_gives_the_same_answers(client: Client, server: Ports) -> None:
    async def ask() -> None:
        expected = client.generate(PROMPT, max_tokens=30).text
        async with AsyncClient(f"127.0.0.1:{server.grpc}") as async_client:
            tasks = [async_client.generate(PROMPT, max_tokens=30) for _ in range(8)]
            assert {answer.text for answer in await asyncio.gather(*tasks)} == {expected}
            pieces = [chunk.text async for chunk in async_client.stream(PROMPT, max_tokens=30)]
            assert len(pieces) > 1
            assert "".join(pieces) == expected
            with pytest.raises(RequestError, match="max_tokens"):
                await async_client.generate(PROMPT, max_tokens=-1)

    asyncio.run(asyncio.wait_for(ask(), WAIT))


def test_a_stream_that_is_closed_or_cancelled_stops_the_work(client: Client, server: Ports) -> None:
    before = cancelled(server)
    chunks = client.stream(PROMPT, **LONG)
    next(chunks)
    chunks.close()
    assert_goes_idle(server)

    async def abandon(way: str) -> None:
        async with AsyncClient(f"127.0.0.1:{server.grpc}") as async_client:
            chunks = async_client.stream(PROMPT, **LONG)
            await anext(chunks)
            if way == "close":
                await chunks.aclose()
            else:
                task = asyncio.create_task(async_client.generate(PROMPT, **LONG))
                await asyncio.sleep(0.1)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                await chunks.aclose()
            await asyncio.to_thread(assert_goes_idle, server)

    for way in ("close", "cancel"):
        asyncio.run(asyncio.wait_for(abandon(way), WAIT))
    assert_cancelled(server, before + 4)


def test_refusals_are_explained(client: Client) -> None:
    for prompt, options, words in (
        ("", {}, "empty"),
        (PROMPT, {"max_tokens": 0}, "max_tokens"),
        (PROMPT, {"top_p": 1.5}, "top_p"),
        (PROMPT, {"max_tokens": 2**31}, "max_tokens is not an integer of 32 bits"),
        (PROMPT, {"max_tokens": "many"}, "max_tokens is not an integer"),
        (PROMPT, {"seed": -1}, "seed is not an integer from 0 on"),
        (PROMPT, {"stop_words": [3]}, r"stop_words\[0\] is not a string"),
        (PROMPT, {"max_tokes": 3}, "max_tokes is unknown"),
        ("\ud800", {}, "text_input is not acceptable"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages is not acceptable"),
        ([{"role": "user", "content": object()}], {}, "messages is not acceptable"),
    ):
        with pytest.raises(RequestError, match=words):
            client.generate(prompt, **options)
    assert client.generate(PROMPT, max_tokens=1).choices[0].completion_tokens == 1


def test_tls_and_headers(tmp_path: Path) -> None:
    ca, stranger = trustme.CA(), trustme.CA()
    own = ca.issue_cert("127.0.0.1")
    for name, authority in (("ca", ca), ("other", stranger)):
        authority.cert_pem.write_to_path(tmp_path / name)
    credentials = grpc.ssl_server_credentials(
        [(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())]
    )
    with stand_in.stand_in(parts(part(text_output=["a"])), credentials=credentials) as server:
        for kind in ("sync", "async"):
            connect = {"tls": Tls(tmp_path / "ca"), "headers": {"X-Key": "k"}}
            assert _ask(server, kind, connect=connect) == "a"
        assert [metadata["x-key"] for metadata in server.metadata] == ["k", "k"]
        for tls in (None, Tls(tmp_path / "other")):
            with pytest.raises(UnavailableError):
                _ask(server, "sync", connect={"tls": tls})
    with pytest.raises(ServerError, match="cannot read"):
        Client("127.0.0.1:1", tls=Tls(tmp_path / "none"))


def _ask(
    server: stand_in.StandIn, kind: str, connect: dict[str, Any] | None = None, **options: Any
) -> str:
    if kind == "sync":
        with Client(server.address, **connect or {}) as client:
            return "".join(chunk.text for chunk in client.stream(PROMPT, **options))

    async def ask() -> str:
        async with AsyncClient(server.address, **connect or {}) as client:
            return "".join([chunk.text async for chunk in client.stream(PROMPT, **options)])

    return asyncio.run(asyncio.wait_for(ask(), WAIT))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_error_is_what_the_server_meant(kind: str) -> None:
    begun = part(text_output=["a"], finish_reason=[""])
    for answer, error in (
        (parts(begun, stand_in.error("UNAVAILABLE", FULL)), UnavailableError),
        (failure("UNAVAILABLE", FULL), UnavailableError),
        (aborted(grpc.StatusCode.UNAVAILABLE), UnavailableError),
        (failure("INVALID_ARG", "top_k is 5. Give less."), RequestError),
        (failure("INTERNAL", "A round failed. The log says why."), ServerError),
        (failure("Traceback", "whatever Triton itself says"), ServerError),
        (aborted(grpc.StatusCode.INTERNAL), ServerError),
        (parts(begun), ServerError),  # it ends before the answer does
        (parts(), ServerError),
    ):
        with stand_in.stand_in(answer) as server:
            with pytest.raises(error) as caught:
                _ask(server, kind)
            assert type(caught.value) is error
            assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_silent_server_is_given_up_at_the_deadline(kind: str) -> None:
    with stand_in.stand_in(hanging()) as server:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match="timeout"):
            _ask(server, kind, timeout=0.2)
        assert 0.2 <= time.monotonic() - start < GRACE + 10
        assert server.timeouts == [pytest.approx(0.2, abs=0.1)]
        assert server.ended.acquire(timeout=WAIT), "the call goes on"


@pytest.mark.parametrize("timeout", [0, float("nan"), float("inf")])
def test_no_time_is_refused(timeout: float) -> None:
    with (
        stand_in.stand_in(parts(part())) as server,
        pytest.raises(RequestError, match=f"timeout is {timeout}"),
    ):
        _ask(server, "sync", timeout=timeout)
    assert server.requests == []


def test_a_model_that_is_down_is_unavailable() -> None:
    for words in (
        "Stub process 'dflash_0_0' is not healthy.",
        "Request for unknown model: 'dflash' has no available versions",
    ):
        message = parts(stand_in.service_pb2.ModelStreamInferResponse(error_message=words))
        with stand_in.stand_in(message) as server, pytest.raises(UnavailableError, match="down"):
            list(stream(server.address, PROMPT, timeout=0.05))


def test_without_a_server_the_fix_is_named() -> None:
    with (
        Client(f"127.0.0.1:{free_ports().grpc}") as client,
        pytest.raises(UnavailableError, match="dflash-trt serve"),
    ):
        client.generate(PROMPT)


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_no_proxy_leads_to_this_machine(
    server: Ports, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Companies set one for all programs; gRPC would take it for 127.0.0.1, too."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for host in ("127.0.0.1", "localhost"):
        with Client(f"{host}:{server.grpc}") as client:
            assert client.generate(PROMPT, max_tokens=2).text


@pytest.mark.parametrize(
    ("address", "here"),
    [
        *((f"{host}:1", True) for host in ("127.0.0.1", "127.1.2.3", "localhost", "[::1]")),
        *((f"{host}:1", False) for host in ("10.0.0.1", "a.example", "", "[::2]")),
    ],
)
def test_which_addresses_are_of_this_machine(address: str, here: bool) -> None:
    assert is_this_machine(address) == here
