"""The OpenAI front over a scripted stand-in: what it asks, what fails, how it starts and ends."""

import asyncio
import json
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import trustme
from tokenizers import Tokenizer

from dflash_trt.checkpoints import speller
from dflash_trt.errors import ServerError
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.http import merging
from dflash_trt.serving.http.fields import TextFields
from dflash_trt.serving.http.merging import AT_ONCE
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.refusals import CLIENT_LIMIT
from dflash_trt.serving.security import Security, Tls
from dflash_trt.serving.supervisor import read_root_path
from dflash_trt.serving.tracing import HEADER
from tests.standins import triton_grpc as stand_in
from tests.standins.triton_grpc import Answer, StandIn, failure, hanging, part, parts
from tests.support.request_tools import wait_until
from tests.support.servers import openai_front
from tests.support.tool_templates import UNKNOWN

WAIT = 60.0
FULL = "The request queue is full. Try again in 7 s."
OVER = f"4 {CLIENT_LIMIT}. Try again in 7 s."


Scripted = Callable[..., tuple[openai.OpenAI, StandIn]]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=WAIT)


@pytest.fixture
def scripted(chat_built: Path) -> Iterator[Scripted]:
    """Return `scripted(*answers)`: the front over a stand-in that gives these answers.

    directory: of a build, by default the chat pair's.
    """
    with ExitStack() as stack:

        def start(*answers: Answer, directory: Path = chat_built) -> tuple[openai.OpenAI, StandIn]:
            server = stack.enter_context(stand_in.stand_in(*answers))
            url = stack.enter_context(openai_front(directory, server.ports))
            return stack.enter_context(client_of(url)), server

        yield start


def test_chat_fields_reach_the_model(scripted: Scripted) -> None:
    api, server = scripted(parts(part(text_output=["Hi"], token_ids=[5], finish_reason=["length"])))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "system", "content": "é"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    same = {
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 5, "min_p": 0.125, "min_tokens": 1, "n": 1},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5},
        **{"ignore_eos": True, "bad_words": ["x"], "stop_token_ids": [3, 4], "priority": 2},
        **{"add_generation_prompt": True, "tool_choice": "auto"},
    }
    other = {
        **{"max_completion_tokens": 9, "stop": "\n", "seed": -1, "user": "somebody", "timeout": 30},
        **{"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
        **{"response_format": {"type": "text"}, "skip_special_tokens": True},
        "include_stop_str_in_output": False,
    }
    found = api.chat.completions.create(
        model="pycode", messages=messages, tools=[tool], extra_body=same | other
    )
    api.chat.completions.create(
        **ASKED, stop=["a", "b"], tools=[tool], tool_choice="none", extra_body={"top_k": -1}
    )
    first, second = server.requests
    sent = json.loads(first.pop("messages"))
    assert [message["content"] for message in sent] == [each["content"] for each in messages]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2]["tool_calls"] == [call]
    assert sent[3]["tool_call_id"] == "1"
    assert json.loads(first.pop("tools")) == [tool]
    values = {"reasoning_effort": "low", "enable_thinking": False}
    assert json.loads(first.pop("chat_template_kwargs")) == values
    renamed = {"stream": False, "max_tokens": 9, "stop_words": ["\n"], "seed": 2**63 - 1}
    assert first == same | renamed
    assert 29 < server.timeouts[0] <= 30
    assert json.loads(second.pop("messages")) == [{"role": "user", "content": "hi"}]
    assert json.loads(second.pop("tools")) == [tool]
    assert second.pop("tool_choice") == "none"
    # OpenAI's temperature when none is given; the length is the server's to choose
    assert second == {"stream": False, "temperature": 1.0, "stop_words": ["a", "b"], "top_k": 0}
    message = found.choices[0].message
    assert (message.role, message.content) == ("assistant", "Hi")
    assert (found.object, found.choices[0].finish_reason) == ("chat.completion", "length")
    assert found.usage is not None
    assert found.usage.completion_tokens == 1


def test_chat_stream_of_two_choices_with_logprobs(scripted: Scripted, chat_built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chat_built / "tokenizer" / "tokenizer.json"))
    one, *half = tokenizer.encode(" return").ids[:1] + tokenizer.encode("é").ids
    pieces = (
        part(
            index=[1],
            text_output=[" return"],
            finish_reason=[""],
            token_ids=[one],
            token_logprobs=[-0.5],
            top_token_ids=[[one, half[0]]],
            top_logprobs=[[-0.5, float("-inf")]],
        ),
        part(text_output=["x"], finish_reason=["stop"]),
        part(index=[1], text_output=["!"], finish_reason=["length"], completion_tokens=[3]),
    )
    api, server = scripted(parts(*pieces))
    fields = ASKED | {"n": 2, "logprobs": True, "top_logprobs": 2}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(api.chat.completions.create(**fields))
    assert (server.requests[0]["n"], server.requests[0]["logprobs"]) == (2, 2)
    *pieces_got, last = chunks
    choices = [chunk.choices[0] for chunk in pieces_got]
    assert [choice.index for choice in choices] == [1, 1, 0, 0, 0, 1, 1]
    roles = ["assistant", None, "assistant", None, None, None, None]
    assert [choice.delta.role for choice in choices] == roles
    contents = [None, " return", None, "x", None, "!", None]
    assert [choice.delta.content for choice in choices] == contents
    reasons = [None, None, None, None, "stop", None, "length"]
    assert [choice.finish_reason for choice in choices] == reasons
    assert choices[1].logprobs is not None
    [entry] = choices[1].logprobs.content or []
    spelled = speller(tokenizer)
    assert bytes(entry.bytes or []) == spelled(one)
    assert entry.token.encode() == spelled(one)
    assert [top.logprob for top in entry.top_logprobs] == [-0.5, -9999.0]
    assert last.usage is not None
    assert last.usage.completion_tokens == 3
    assert last.metrics is None  # type: ignore[attr-defined]  # AIPerf's figures are of one choice


TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
ASKED: dict[str, Any] = {"model": "dflash", "messages": [{"role": "user", "content": "hi"}]}
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (CALLS, {}),
        (CALLS, {"tools": TOOLS, "tool_choice": "none"}),
        ("Hi <tool_call> there \n", {"tools": TOOLS}),
    ],
)
def test_text_without_calls_is_text(
    scripted: Scripted, text: str, fields: dict[str, Any], stream: bool
) -> None:
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)] if stream else [text]
    news = [part(text_output=[piece], finish_reason=[""]) for piece in pieces]
    api, _ = scripted(parts(*news[:-1], part(text_output=pieces[-1:])))
    if stream:
        with api.chat.completions.stream(**ASKED, **fields) as events:
            events.until_done()
            choice: Any = events.current_completion_snapshot.choices[0]
    else:
        choice = api.chat.completions.create(**ASKED, **fields).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    assert not choice.message.tool_calls


def test_a_model_whose_calls_cannot_be_read_has_no_tools(
    scripted: Scripted, chat_built: Path, tmp_path: Path
) -> None:
    shutil.copy(chat_built / "manifest.json", tmp_path)
    shutil.copytree(chat_built / "tokenizer", tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": UNKNOWN}))
    api, _ = scripted(parts(part(text_output=["Hi"])), directory=tmp_path)
    with pytest.raises(openai.BadRequestError, match="form not known here") as caught:
        api.chat.completions.create(**ASKED, tools=TOOLS)
    assert caught.value.param == "tools"
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert api.chat.completions.create(**ASKED, **more).choices[0].message.content == "Hi"


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [
        (failure("UNAVAILABLE", FULL), 503, "server_error"),
        (failure("UNAVAILABLE", OVER), 429, "rate_limit_error"),
        (failure("INTERNAL", "A round failed at /srv/x.py. Look."), 500, "server_error"),
        (failure("INVALID_ARG", "top_k is -5. Give 0 or more."), 400, "invalid_request_error"),
        (parts(part(finish_reason=["cancelled"])), 504, "timeout_error"),
        (parts(part(finish_reason=["error"])), 500, "server_error"),
    ],
)
def test_failures_have_their_status(
    scripted: Scripted, answer: Answer, status: int, kind: str
) -> None:
    api, server = scripted(answer)
    with pytest.raises(openai.APIStatusError) as caught:
        api.completions.create(model="pycode", prompt="a")
    assert (caught.value.status_code, caught.value.type) == (status, kind)
    assert "/srv" not in caught.value.message
    again = caught.value.response.headers.get("retry-after")
    assert again == ("7" if status in (429, 503) else None)
    assert server.address not in caught.value.message
    assert len(server.requests) == 1, "OpenAI's client has its own retries"


def test_an_answer_is_kept_unless_the_request_says_not_to(scripted: Scripted) -> None:
    api, _ = scripted(parts(part(text_output=["Hi"], token_ids=[5])))
    kept = api.responses.create(model="pycode", input="a")
    assert api.responses.retrieve(kept.id).output_text == "Hi"
    other = api.responses.create(model="pycode", input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(other.id)


def test_a_failure_in_the_middle_of_a_stream_is_an_event(scripted: Scripted) -> None:
    begun = part(text_output=["a"], finish_reason=[""])
    for answer, words in (
        (parts(begun, stand_in.error("INTERNAL", "A round failed. Look.")), "failed"),
        (parts(begun, part(finish_reason=["cancelled"])), "timeout"),
        (parts(begun), "failed"),  # Triton ends the stream too early
    ):
        api, _ = scripted(answer)
        stream = api.completions.create(model="pycode", prompt="a", stream=True)
        assert next(stream).choices[0].text == "a"
        with pytest.raises(openai.APIError, match=words):
            list(stream)


def test_the_front_shows_triton_its_key_and_says_for_whom_it_asks(chat_built: Path) -> None:
    with stand_in.stand_in(parts(part())) as server:
        security = Security(keys=("s3cret",))
        with openai_front(chat_built, server.ports, security) as own:
            body = {"model": "pycode", "prompt": "a", "user": "somebody"}
            lies = {"X-Forwarded-For": "1.2.3.4", "Forwarded": "for=1.2.3.4"}
            url = f"{own}/v1/completions"
            assert httpx.post(url, json=body, timeout=WAIT, headers=lies).status_code == 401
            bearer = {"Authorization": "Bearer s3cret"}  # it is OpenAI's key too
            answer = httpx.post(url, json=body, timeout=WAIT, headers=lies | bearer)
            assert answer.status_code == 200
        assert server.metadata[0]["triton-grpc-protocol-inference-key"] == "s3cret"
        who = {"client": "127.0.0.1", "client-key": security.client_key}
        assert server.said == [{**who, HEADER: answer.headers[HEADER]}]


def test_with_tls_the_front_calls_its_own_server(chat_built: Path, tmp_path: Path) -> None:
    """Whatever name its certificate has; another server gets no request."""
    own, other = (_tls(tmp_path / name, "*.example.com") for name in ("own", "other"))
    body = {"model": "pycode", "prompt": "a"}
    for server_has, status in ((own, 200), (other, 503)):
        with stand_in.stand_in(parts(part()), credentials=_credentials(server_has)) as server:
            with openai_front(chat_built, server.ports, Security(tls=own)) as url:
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
                assert answer.status_code == status
            assert len(server.requests) == (status == 200)


def _tls(directory: Path, name: str) -> Tls:
    directory.mkdir(exist_ok=True)
    issued = trustme.CA().issue_cert(name)
    issued.cert_chain_pems[0].write_to_path(directory / "cert")
    issued.private_key_pem.write_to_path(directory / "key")
    return Tls(directory / "cert", directory / "key")


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(tls.key.read_bytes(), tls.cert.read_bytes())])


@pytest.mark.parametrize(("stream", "begun"), [(False, False), (True, False), (True, True)])
def test_a_client_that_goes_away_cancels_the_request(
    scripted: Scripted, stream: bool, begun: bool
) -> None:
    first = [part(text_output=["a"], finish_reason=[""])] if begun else []
    api, server = scripted(hanging(*first))
    body = json.dumps({"model": "pycode", "prompt": "a", "stream": stream}).encode()
    address = ("127.0.0.1", api.base_url.port or 0)
    with socket.create_connection(address, timeout=WAIT) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        if begun:
            assert connection.recv(12) == b"HTTP/1.1 200"
        else:
            wait_until(lambda: len(server.requests) == 1)
    assert server.ended.acquire(timeout=10), "the request goes on"


def test_without_triton_nothing_is_ready(scripted: Scripted) -> None:
    api, _ = scripted(parts(part()))
    base = str(api.base_url).removesuffix("/v1/")
    assert httpx.get(f"{base}/health").status_code == 503
    page = httpx.get(f"{base}/metrics")
    assert (page.status_code, "nv_" in page.text) == (200, False)
    assert "dflash_restarts_total" in page.text


def test_the_front_stops_in_bound_with_open_streams(chat_built: Path) -> None:
    slow = hanging(part(text_output=["a"], finish_reason=[""]))
    with stand_in.stand_in(slow) as server, ThreadPoolExecutor(4) as pool:
        port = free_ports().http

        def ask(url: str) -> None:
            with client_of(url) as api:
                list(api.completions.create(model="pycode", prompt="a", stream=True))

        with openai_front(chat_built, server.ports, port=port) as url:
            asked = [pool.submit(ask, url) for _ in range(4)]
            wait_until(lambda: len(server.requests) == 4)
            start = time.monotonic()
        assert time.monotonic() - start < 10
        for each in asked:
            assert each.exception(timeout=WAIT) is not None
        with socket.create_server(("127.0.0.1", port)):
            pass  # the port is free again


def slow(seconds: float, *rest: Any) -> Answer:
    """Answer after some seconds, in which the client waits."""

    def answer(_: Any, call: stand_in.Call) -> Iterator[Any]:
        call.hang(seconds)
        yield from rest

    return answer


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_stream_that_waits_has_begun(scripted: Scripted, path: str) -> None:
    """Its headers and a comment come before the first token, and clients do not see it."""
    ending = part(text_output=["Hi"], token_ids=[5], finish_reason=["stop"])
    api, _ = scripted(slow(4 * AT_ONCE, ending))
    inputs = {"messages": ASKED["messages"], "prompt": "hi", "input": "hi"}
    field = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    body = {"model": "dflash", "stream": True, field: inputs[field]}
    with httpx.stream("POST", f"{api.base_url}{path}", json=body, timeout=WAIT) as answer:
        assert answer.status_code == 200
        lines = list(answer.iter_lines())
    comments = [number for number, line in enumerate(lines) if line.startswith(":")]
    texts = [number for number, line in enumerate(lines) if '"Hi"' in line]
    assert comments
    assert comments[0] < texts[0]
    stream: Any
    if path == "responses":
        with api.responses.stream(model="dflash", input="hi") as stream:
            assert stream.get_final_response().output_text == "Hi"
    elif path == "completions":
        stream = api.completions.create(model="dflash", prompt="hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hi"
    else:
        stream = api.chat.completions.create(**ASKED, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hi"


def test_a_stream_that_fails_later_ends_with_an_error(scripted: Scripted) -> None:
    def fail_late(_: Any, call: stand_in.Call) -> Iterator[Any]:
        call.hang(3 * AT_ONCE)
        call.abort(grpc.StatusCode.UNAVAILABLE, FULL)
        yield

    api, _ = scripted(failure("UNAVAILABLE", FULL), fail_late)
    with pytest.raises(openai.InternalServerError) as caught:
        api.chat.completions.create(**ASKED, stream=True)
    assert caught.value.status_code == 503
    with pytest.raises(openai.APIError) as late:
        list(api.chat.completions.create(**ASKED, stream=True))
    assert "the server cannot take the request now" in str(late.value).lower()


def test_comments_come_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "AT_ONCE", 0.01)
    monkeypatch.setattr(merging, "PAUSE", 0.01)

    class Client:
        async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Chunk]:
            for _ in range(2):
                await asyncio.sleep(0.2)
                yield Chunk("x")

    async def collect(*, stream: bool) -> list[Chunk | None]:
        fields = TextFields(model="dflash", prompt="a", stream=stream)
        client: Any = Client()
        chunks = merging.merged(client, ["a"], {}, fields)
        return [chunk async for chunk in chunks]

    *_, before, last = collected = asyncio.run(collect(stream=True))
    assert collected[0] is before is None
    assert last is not None
    assert [chunk.text for chunk in collected if chunk] == ["x", "x"]
    middle = collected.index(next(filter(None, collected)))
    assert len(collected) - middle > 2


def test_a_server_has_a_path_behind_an_ingress(chat_built: Path) -> None:
    """Whether the ingress strips it or not; redirects and the page's own links have it."""
    ending = part(text_output=["Hi"], token_ids=[5], finish_reason=["stop"])
    with ExitStack() as stack:
        server = stack.enter_context(stand_in.stand_in(parts(ending)))
        url = stack.enter_context(openai_front(chat_built, server.ports, root_path="/a/llm"))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=WAIT))
        for root in ("", "/a/llm"):
            assert http.get(f"{root}/v1/models").status_code == 200
            assert http.post(f"{root}/v1/chat/completions", json=ASKED).status_code == 200
            assert http.get(f"{root}/v2/models/none").status_code == 404
            moved = http.get(f"{root}/v1/models/?a=b")
            assert (moved.status_code, moved.headers["location"]) == (307, "/a/llm/v1/models?a=b")
            page = http.get(f"{root}/").text
            links = re.findall(r'(?:href|src)="(/[^"]*)"', page)
            assert links
            assert all(link.startswith("/a/llm/page/") for link in links)
            assert [http.get(link).status_code for link in links] == [200] * len(links)
        assert http.get("/a/llm").status_code == 200
        assert http.get("/a/llmx/v1/models").status_code == 404
        assert http.get("/a/llm/openapi.json").json()["servers"] == [{"url": "/a/llm"}]


def test_a_redirect_names_no_host(scripted: Scripted) -> None:
    """Only an ingress knows its own, and whether it has TLS."""
    api, _ = scripted(hanging)
    moved = httpx.get(f"{api.base_url}models/")
    assert (moved.status_code, moved.headers["location"]) == (307, "/v1/models")


@pytest.mark.parametrize("path", ["llm", "/a b", "/a?b", "//", "/a//b", "http://a/b"])
def test_a_root_path_that_is_none_is_named(path: str) -> None:
    if path == "//":
        assert read_root_path(path) == ""
        return
    with pytest.raises(ServerError, match="--root-path"):
        read_root_path(path)


def test_pages_of_other_origins_may_delete(chat_built: Path) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "DELETE"}
    security = Security(allow_origin=("https://a.example",))
    with (
        stand_in.stand_in(hanging) as server,
        openai_front(chat_built, server.ports, security) as url,
    ):
        answer = httpx.options(f"{url}/v1/responses/none", headers=asked)
        assert answer.status_code == 200
        assert "DELETE" in answer.headers["access-control-allow-methods"]


def test_it_is_told_of_many_keys(chat_built: Path) -> None:
    """More than a line of 64 KiB holds."""
    keys = tuple(f"key-{number:064}" for number in range(2000))
    with (
        stand_in.stand_in(hanging) as server,
        openai_front(chat_built, server.ports, Security(keys=keys)) as url,
    ):
        header = {"Authorization": f"Bearer {keys[-1]}"}
        assert httpx.get(f"{url}/v1/models", headers=header).status_code == 200
