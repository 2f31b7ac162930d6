"""What the OpenAI front serves a browser: the page's files, and what they ask for."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_trt.builder.identity import about_build
from dflash_trt.serving.http.page import FILES
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import Security
from tests.support.commands import run
from tests.support.servers import openai_front

KEY = "s3cret-0123456789"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def front(chat_built: Path, triton: Ports) -> Iterator[httpx.Client]:
    with (
        openai_front(chat_built, triton, Security(keys=(KEY,))) as url,
        httpx.Client(base_url=url) as client,
    ):
        yield client


def test_the_files_need_no_key_and_may_do_little(front: httpx.Client) -> None:
    for path, file in FILES.items():
        answer = front.get(path)
        assert (answer.status_code, answer.content) == (200, file.read_bytes())
        kind = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
        assert answer.headers["content-type"] == f"{kind[file.suffix]}; charset=utf-8"
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= {*policy}
        assert not [each for each in policy if "unsafe" in each or "http" in each]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
    assert front.head("/").status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../page.py", "/page/%2e%2e/app.py", "/page//etc"]
)
def test_nothing_else_is_given_out(front: httpx.Client, path: str) -> None:
    assert front.get(path).status_code == 401
    assert front.get(path, headers=WITH_KEY).status_code == 404


def test_what_the_page_asks_for_needs_the_key(front: httpx.Client, triton: Ports) -> None:
    for path in ("/page/server", "/v1/models"):
        assert front.get(path).status_code == 401
        assert front.get(path, headers=WITH_KEY).status_code == 200
    metrics = front.get("/metrics")
    assert "dflash_requests_total" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_server_at_a_glance(front: httpx.Client) -> None:
    assert front.get("/page/server", headers=WITH_KEY).json() == {
        "model": "pycode",
        "engine": "onnxruntime",
        "slots": 4,
        "max_model_len": 1024,
        "max_draft_tokens": 15,
        "chat": True,
        "tools": True,
        "schema": True,
        "plain": True,
        "untold": [],
    }


def test_what_the_server_runs(front: httpx.Client, chat_built: Path) -> None:
    assert front.get("/v1/build").status_code == 401
    facts = front.get("/v1/build", headers=WITH_KEY).json()
    since = facts.pop("serving_since")
    assert facts.pop("drafter_swaps") == []
    assert since.endswith("+00:00")
    assert facts == json.loads(json.dumps(about_build(chat_built)))
    digest = facts["digest"][:12]
    metrics = front.get("/metrics").text
    labels = f'build="pycode",digest="{digest}",drafter="{digest}",engine_kind="onnxruntime"'
    assert f'\ndflash_build_info{{{labels},version="0.1.0"}} 1\n' in metrics


def test_info_asks_a_server(chat_built: Path, triton: Ports, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    with openai_front(chat_built, triton, Security(keys=(KEY,))) as url:
        code, out, _ = run("info", "--url", url, "--key-file", tmp_path / "key")
        refused = run("info", "--url", url)
    assert code == 0
    assert out.startswith(f"pycode {about_build(chat_built)['digest'][:12]}\n")
    assert "\n  serving     since 20" in out
    assert (refused.code, "wants a key" in refused.err) == (1, True)
