"""HTTP around the APIs: methods, types of bodies, web pages of other origins; no Triton."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import Security
from tests.support.servers import openai_front

WAIT, KEY, PAGE = 60.0, "inference-0123456789", "https://a.example:3000"
NOWHERE = Ports(1, 1, 1)
BODY = json.dumps({"model": "none", "prompt": "x"}).encode()
READ = 404  # of the model that there is none: the body was read


@pytest.fixture(scope="module")
def url(built: Path) -> Iterator[str]:
    with openai_front(built, NOWHERE, Security(keys=(KEY,), allow_origin=(PAGE,))) as url:
        yield url


def ask(url: str, method: str, path: str, content: bytes = b"", **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    key = {"authorization": f"bearer {KEY}"}  # a scheme's case does not matter
    return httpx.request(method, f"{url}{path}", content=content, headers=key | names, timeout=WAIT)


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"content_type": "application/json"}, READ, ""),
        ({"content_type": "Application/JSON; charset=UTF-8"}, READ, ""),
        ({"content_type": "application/vnd.api+json"}, READ, ""),
        ({"content_type": "application/json", "content_encoding": "Identity"}, READ, ""),
        ({"content_type": "application/x-www-form-urlencoded"}, 415, "x-www-form-urlencoded"),
        ({"content_type": "text/plain"}, 415, "Content-Type: application/json"),
        ({}, 415, "Content-Type: application/json"),
        ({"content_type": "application/json", "content_encoding": "gzip"}, 415, "gzip"),
        ({"content_type": "application/json", "content_encoding": "br"}, 415, "Content-Encoding"),
    ],
)
def test_the_type_of_a_body(url: str, headers: dict[str, str], status: int, words: str) -> None:
    packed = headers.get("content_encoding") == "gzip"
    answer = ask(url, "POST", "/v1/completions", gzip.compress(BODY) if packed else BODY, **headers)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True)
    if status == 415:
        assert answer.headers["accept"] == "application/json"
        assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET"), ("PUT", "/", "GET")],
)
def test_a_wrong_method_is_told_the_right_one(
    url: str, method: str, path: str, allowed: str
) -> None:
    answer = ask(url, method, path)
    assert answer.status_code == 405
    assert allowed in answer.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/v1/models", "/openapi.json"])
def test_head_is_get_without_its_body(url: str, path: str) -> None:
    got, head = ask(url, "GET", path), ask(url, "HEAD", path)
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_no_page_loads_from_another_host(url: str, path: str) -> None:
    assert ask(url, "GET", path).status_code == 404


def test_pages_of_an_allowed_origin_may_call(url: str) -> None:
    """The browser's preflight has no key; refusals are readable too."""
    wanted = {"access_control_request_method": "POST"}
    wanted["access_control_request_headers"] = "authorization,content-type,x-stainless-lang"
    for origin, allowed in ((PAGE, PAGE), ("https://b.example", None)):
        headers = {name.replace("_", "-"): value for name, value in wanted.items()}
        asked = httpx.options(f"{url}/v1/completions", headers={**headers, "origin": origin})
        assert asked.headers.get("access-control-allow-origin") == allowed
        assert asked.is_success == bool(allowed)
        for key in (f"Bearer {KEY}", "Bearer guess"):
            answer = ask(url, "GET", "/v1/models", origin=origin, authorization=key)
            assert answer.headers.get("access-control-allow-origin") == allowed


def test_by_default_no_other_origin_may_call(built: Path) -> None:
    with openai_front(built, NOWHERE) as url:
        answer = httpx.get(f"{url}/v1/models", headers={"origin": PAGE})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_description_has_the_bodies(url: str) -> None:
    description = ask(url, "GET", "/openapi.json").json()
    schemas = description["components"]["schemas"]
    for path, name in (
        ("/v1/chat/completions", "ChatFields"),
        ("/v1/completions", "TextFields"),
        ("/v1/responses", "ResponseRequest"),
    ):
        body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert "model" in schemas[name]["properties"]
    text = json.dumps(description)
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= schemas.keys()


INFER = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
REBOUND = {"host": "evil.example:8000"}
PAGES = {"origin": "https://evil.example", "content-type": "text/plain"}


@pytest.fixture(scope="module")
def open_url(built: Path) -> Iterator[str]:
    """Run an application on loopback without a key, as by default."""
    security = Security(allow_host=("My.Laptop",), allow_origin=(PAGE,))
    with openai_front(built, NOWHERE, security) as url:
        yield url


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/v2/health/live", "/metrics"])
def test_a_rebound_name_reads_nothing(open_url: str, path: str) -> None:
    """A page of it would be of the same origin, so that a browser would show it the answer."""
    answer = httpx.get(f"{open_url}{path}", headers=REBOUND)
    assert (answer.status_code, "--allow-host" in answer.text) == (403, True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:80", "my.laptop:9"])
def test_its_own_names_are_answered(open_url: str, host: str) -> None:
    assert httpx.get(f"{open_url}/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/v2/models/dflash_infer/infer", "/v1/completions"])
def test_a_page_of_another_origin_asks_for_nothing(open_url: str, path: str) -> None:
    """A browser sends a simple POST without asking; the page cannot read, but it costs time."""

    def ask(**headers: str) -> httpx.Response:
        return httpx.post(f"{open_url}{path}", content=json.dumps(INFER), headers=headers)

    answer = ask(**PAGES)
    assert (answer.status_code, "--allow-origin" in answer.text) == (403, True)
    for origin in (open_url, PAGE):
        assert ask(**{**PAGES, "origin": origin}).status_code != 403
    assert ask(**{"content-type": "text/plain"}).status_code != 403


def test_with_a_key_names_do_not_matter(url: str, built: Path) -> None:
    assert ask(url, "GET", "/v1/models", **REBOUND).status_code == 200
    assert ask(url, "POST", "/v1/completions", BODY, origin="https://b.example").status_code != 403


def test_nothing_is_a_body_too(url: str) -> None:
    """OpenAI's client cancels a response so; only one in the background could be."""
    answer = ask(url, "POST", "/v1/responses/resp_1/cancel")
    assert (answer.status_code, "background" in answer.text) == (400, True)
