"""Who may reach the real server, with which keys and certificates, and what its log keeps."""

import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.errors import ServerError
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.security import (
    Security,
    Tls,
    certificate_name,
    host_name,
    read_security,
    refuse_exposed_old_server,
)
from dflash_trt.serving.supervisor.process import Server
from dflash_trt.serving.supervisor.run import Options, running_server, set_up
from tests.support.request_tools import tensors, wait_until
from tests.support.servers import serve_ports, serving

WAIT = 30.0
KEY = "inference-0123456789"
PROMPT = "def zzqx_a_secret():"
CHANGES: dict[str, tuple[Any, ...]] = {  # gRPC's; HTTP's routes are in test_app.py
    "unload_model": ("verify",),
    "register_system_shared_memory": ("x", "/x", 1),
    "update_trace_settings": (),
    "update_log_settings": ({},),
}
LOOKS: dict[str, tuple[Any, ...]] = {
    "get_model_config": ("dflash",),
    "get_inference_statistics": ("dflash",),
    "get_model_metadata": ("dflash",),
    "is_server_ready": (),
}


@pytest.fixture(scope="module")
def keyed(built: Path) -> Iterator[Ports]:
    with running_server(built, Security(keys=(KEY,))) as ports:
        yield ports


def _http(ports: Ports, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    answer = httpx.request(
        "GET" if body is None else "POST",
        f"http://127.0.0.1:{ports.http}/v2/{path}",
        json=body,
        headers={k.replace("_", "-"): v for k, v in headers.items()},
        timeout=WAIT,
    )
    return answer.status_code, answer.text


def _generate(ports: Ports, **headers: str) -> int:
    body = {"text_input": PROMPT, "max_tokens": 4}
    return _http(ports, "models/dflash/generate", body, **headers)[0]


def _infer(client: InferenceServerClient, headers: dict[str, str] | None = None) -> int:
    inputs = tensors({"text_input": PROMPT, "max_tokens": 4})
    result = client.infer("dflash_infer", inputs, headers=headers, client_timeout=WAIT)
    return len(result.as_numpy("token_ids"))


def _allowed(ports: Ports, call: str, arguments: tuple[Any, ...], headers: dict[str, str]) -> bool:
    with InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        try:
            getattr(client, call)(*arguments, headers=headers, client_timeout=WAIT)
        except InferenceServerException as error:
            if "restricted" not in str(error):
                raise
            return False
        return True


@pytest.mark.parametrize("call", CHANGES)
def test_nobody_changes_the_server(plain: Ports, call: str) -> None:
    for key in ({}, {"triton-grpc-protocol-admin-key": "guess"}):
        assert not _allowed(plain, call, CHANGES[call], key)
    assert _generate(plain) == 200


@pytest.mark.parametrize("call", LOOKS)
def test_looking_is_free(plain: Ports, call: str) -> None:
    assert _allowed(plain, call, LOOKS[call], {})


def test_requests_need_the_key(keyed: Ports) -> None:
    assert _generate(keyed) == _generate(keyed, inference_key="guess") == 401
    assert _generate(keyed, inference_key=KEY) == 200
    assert _generate(keyed, authorization=f"Bearer {KEY}") == 200
    with InferenceServerClient(f"127.0.0.1:{keyed.grpc}") as client:
        with pytest.raises(InferenceServerException, match="restricted") as caught:
            _infer(client)
        assert KEY not in str(caught.value)
        assert _infer(client, {"triton-grpc-protocol-inference-key": KEY}) == 4
    with (
        Client(f"127.0.0.1:{keyed.grpc}") as plain,
        pytest.raises(ServerError, match=r"restricted.*inference-key"),
    ):
        plain.generate(PROMPT)


def _write_certificate(directory: Path) -> None:
    """Write `cert` and `key` of this machine, and the `ca` that issued them."""
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1", "localhost")
    ca.cert_pem.write_to_path(directory / "ca")
    issued.cert_chain_pems[0].write_to_path(directory / "cert")
    issued.private_key_pem.write_to_path(directory / "key")


def test_tls(built: Path, tmp_path: Path) -> None:
    _write_certificate(tmp_path)
    files = {"grpc_cert": tmp_path / "cert", "grpc_key": tmp_path / "key"}
    with running_server(built, read_security("127.0.0.1", **files)) as ports:
        body = {"model": "pycode", "prompt": PROMPT, "max_tokens": 4}  # over Triton's gRPC, too
        url = f"http://127.0.0.1:{ports.http}/v1/completions"
        assert httpx.post(url, json=body, timeout=WAIT).status_code == 200
        tls = {"ssl": True, "root_certificates": str(tmp_path / "ca")}
        with InferenceServerClient(f"localhost:{ports.grpc}", **tls) as channel:
            assert _infer(channel) == 4
        with (
            InferenceServerClient(f"localhost:{ports.grpc}") as channel,
            pytest.raises(InferenceServerException),
        ):
            _infer(channel)


def test_tls_on_http(built: Path, tmp_path: Path) -> None:
    _write_certificate(tmp_path)
    ports = serve_ports()
    url = f"https://localhost:{ports.http}"
    options = (f"--http-cert={tmp_path / 'cert'}", f"--http-key={tmp_path / 'key'}")
    trust = ssl.create_default_context(cafile=tmp_path / "ca")
    with (
        serving(built, ports, *options) as (_, said),
        httpx.Client(base_url=url, verify=trust, timeout=WAIT) as client,
        socket.create_connection(("127.0.0.1", ports.http)) as silent,
    ):
        assert f"https://127.0.0.1:{ports.http}/v1" in said
        assert client.get("/health").status_code == 200
        body = {"model": "dflash", "prompt": PROMPT, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{ports.http}/health")
        silent.settimeout(WAIT)
        assert silent.recv(1) == b""  # closed, though no handshake began


def test_keys_change_while_it_runs(built: Path, tmp_path: Path) -> None:
    old, new, third = (f"{name}-0123456789abcdef" for name in ("old", "new", "third"))
    file, ports = tmp_path / "keys", serve_ports()
    file.write_text(f"{old}\n{new}\n")
    url = f"http://127.0.0.1:{ports.http}/v1/models"

    def status(key: str) -> int:
        return httpx.get(url, headers={"Authorization": f"Bearer {key}"}).status_code

    with serving(built, ports, f"--key-file={file}"):
        assert [status(key) for key in (old, new, third)] == [200, 200, 401]
        (tmp_path / "next").write_text(f"{new}\n\n{third}\n")
        (tmp_path / "next").replace(file)
        wait_until(lambda: status(third) == 200)
        assert [status(key) for key in (old, new)] == [401, 200]
        file.write_text("short")
        time.sleep(1)
        assert [status(key) for key in (old, new, third, "short")] == [401, 200, 200, 401]
        with InferenceServerClient(f"127.0.0.1:{ports.grpc}") as channel:
            inputs = tensors({"text_input": "a", "max_tokens": 1})
            header = {"triton-grpc-protocol-inference-key": old}
            assert channel.infer("dflash_infer", inputs, headers=header)  # until a restart


def test_a_name_that_the_certificate_is_for(tmp_path: Path) -> None:
    def name(**options: Any) -> str:
        issued = trustme.CA().issue_cert(*options.pop("names", ()), **options)
        tls = Tls(tmp_path / "cert", tmp_path / "key")
        issued.cert_chain_pems[0].write_to_path(tls.cert)
        issued.private_key_pem.write_to_path(tls.key)
        return certificate_name(tls)

    assert name(names=["b.example", "a.example"], common_name="other") == "b.example"
    assert name(names=["10.0.0.1"]) == "10.0.0.1"
    assert name(names=["*.example"]).endswith(".example")
    assert name(common_name="triton") == "triton"
    with pytest.raises(ServerError, match=r"--grpc-cert .*expired"):
        name(names=["a"], not_after=datetime(2020, 1, 1, tzinfo=UTC))


def test_with_tls_http_stays_on_this_machine() -> None:
    assert Security("10.0.0.1", Tls(Path("cert"), Path("key"))).http_host == "127.0.0.1"
    assert Security("10.0.0.1").http_host == "10.0.0.1"


def test_it_listens_where_it_is_told_to(built: Path) -> None:
    with running_server(built, Security("127.0.0.2")) as ports:
        with pytest.raises(httpx.ConnectError):
            _http(ports, "health/ready")
        with InferenceServerClient(f"127.0.0.2:{ports.grpc}") as client:
            assert _infer(client) == 4


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_every_api_is_where_it_is_told_to(built: Path, host: str) -> None:
    ports = serve_ports()
    name = f"[{host}]" if ":" in host else host
    with serving(built, ports, f"--host={name}") as (_, said):
        assert f"http://{name}:{ports.http}/v1" in said
        assert f"gRPC {name}:{ports.grpc}" in said
        body = {"model": "pycode", "prompt": PROMPT, "max_tokens": 4}
        for path in ("v1/completions", "metrics", "health", "v2/health/ready"):
            url = f"http://{name}:{ports.http}/{path}"
            json = body if path.startswith("v1") else None
            answer = httpx.request("POST" if json else "GET", url, json=json, timeout=WAIT)
            assert answer.status_code == 200, (path, answer.text)
        with InferenceServerClient(f"{name}:{ports.grpc}") as client:
            assert _infer(client) == 4
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{ports.http}/health")


def test_both_families_at_once(built: Path) -> None:
    """`::` takes IPv4, too, as clusters with both expect."""
    with running_server(built, Security("::", old_server_exposed=True)) as ports:
        for name in ("127.0.0.1", "[::1]"):
            url = f"http://{name}:{ports.http}/v1/models"
            assert httpx.get(url, timeout=WAIT).status_code == 200
            with InferenceServerClient(f"{name}:{ports.grpc}") as client:
                assert _infer(client) == 4


def test_addresses_of_both_families_are_read_in_one_form() -> None:
    forms = {
        **{"[::1]": "::1", "0:0:0:0:0:0:0:1": "::1", "::": "::", "[2001:DB8::1]": "2001:db8::1"},
        **{"::ffff:10.0.0.1": "10.0.0.1", "::ffff:127.0.0.1": "127.0.0.1", "0.0.0.0": "0.0.0.0"},
    }
    assert {given: read_security(given).host for given in forms} == forms
    exposed = {host: read_security(host).exposed for host in forms}
    assert [host for host in forms if not exposed[host]] == [
        *("[::1]", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1")
    ]
    assert Security("::").http_url == "http://[::1]"
    tls = Tls(Path("cert"), Path("key"))
    assert Security("::", tls).http_host == "::1"


def test_names_of_a_host_header() -> None:
    hosts = Security("::1", allow_host=("My.Name", "fe80::2")).hosts
    assert hosts is not None
    for host in (
        *("localhost:8000", "LOCALHOST", "127.0.0.1:80", "[::1]:8000", "[::1]", "my.name:1"),
        *("[0:0:0:0:0:0:0:1]:8000", "[FE80::2]"),
    ):
        assert host_name(host) in hosts, host
    for host in ("a.example", "[::2]:8000", "[::1].example", "[::1]x:80", "::1.example", ""):
        assert host_name(host) not in hosts, host


def test_pings_do_not_end_a_connection(plain: Ports) -> None:
    """Load balancers and gateways need them; Triton alone allows one in five minutes."""
    options = [
        *(("grpc.keepalive_time_ms", 1_000), ("grpc.keepalive_timeout_ms", 20_000)),
        *(
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_time_between_pings_ms", 1_000),
        ),
    ]
    waiting = threading.Event()

    def nothing_yet() -> Iterator[bytes]:
        waiting.wait()
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{plain.grpc}", options) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        call = stream(nothing_yet())
        time.sleep(6)
        waiting.set()
        assert [*call] == []  # it is not sent away, which is an error


def test_an_address_of_another_machine_is_named(built: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"192\.0\.2\.1.*--host"),
        running_server(built, Security("192.0.2.1")),
    ):
        pass


def test_the_bundled_server_is_not_exposed(built: Path) -> None:
    server = Server(OpenedBuild(built, "none"), free_ports(), Security("0.0.0.0"))
    with pytest.raises(ServerError, match=r"2\.51 has known security.*--insecure-old-server"):
        server.__enter__()
    assert not server.log.path.parent.exists()


@pytest.mark.parametrize(
    ("version", "refused"), [("2.51.0", True), ("2.70.9", True), ("2.71.0", False), (None, True)]
)
def test_a_new_server_may_be_exposed(tmp_path: Path, version: str | None, refused: bool) -> None:
    # stands in for tritonserver's table of options, which it prints at every start
    binary = tmp_path / "tritonserver"
    row = f"| server_version                   | {version}   |" if version else "error"
    binary.write_text(f"#!/bin/sh\necho '{row}' >&2\nexit 1\n")
    binary.chmod(0o755)
    refusal = pytest.raises(ServerError, match="--insecure-old-server")
    with refusal if refused else nullcontext():
        refuse_exposed_old_server(read_security("10.0.0.1"), binary)
    refuse_exposed_old_server(read_security("127.0.0.1"), binary)
    refuse_exposed_old_server(read_security("10.0.0.1", old_server_exposed=True), binary)


def test_bad_options_are_named(tmp_path: Path) -> None:
    for host in ("localhost", "10.0.0", "", "[127.0.0.1]", "::1]", "fe80::1%eth0", ":::"):
        with pytest.raises(ServerError, match="--host"):
            read_security(host)
    with pytest.raises(ServerError, match="both --grpc-cert and --grpc-key"):
        read_security("127.0.0.1", grpc_cert=tmp_path / "cert")
    (tmp_path / "cert").write_text("no PEM")
    with pytest.raises(ServerError, match="--grpc-cert"):
        read_security("127.0.0.1", grpc_cert=tmp_path / "cert", grpc_key=tmp_path / "cert")
    for text in ("", "short", "with spaces in between", "no:colon=and,the,like", "é" * 20):
        (tmp_path / "file").write_text(text)
        with pytest.raises(ServerError, match="--key-file"):
            read_security("127.0.0.1", key_file=tmp_path / "file")
    with pytest.raises(ServerError, match="--key-file"):
        read_security("127.0.0.1", key_file=tmp_path / "missing")


def test_a_key_is_read_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(KEY + "\n")
    security = read_security("127.0.0.1", key_file=tmp_path / "file")
    assert security.keys == (KEY,)
    assert KEY not in repr(security)
    assert security.own_key not in repr(security)
    assert Security().own_key != Security().own_key


def test_the_log_keeps_no_prompt_and_no_key(built: Path) -> None:
    secret = "zzqx" * 4
    security = Security(keys=(KEY,))
    ports = free_ports()
    with ExitStack() as stack:
        server, application = set_up(
            stack, OpenedBuild(built, "none"), Options(ports.http, ports.grpc, security)
        )
        stack.enter_context(server)
        application.start(server.log)
        server.wait_ready()
        application.tell("ready")
        bodies: list[Any] = [
            {"text_input": secret, "max_tokens": 8},
            {"text_input": secret, "max_tokens": 8, "stream": True},
            {"text_input": secret, "max_tokens": -1},
            {"text_input": secret * 1000},
            {"text_input": [secret, secret]},
            {"text_input": secret, "unknown": {secret: secret}},
            {"text": secret},
            secret,
        ]
        for body in bodies:
            for model in ("dflash", "dflash_infer", "none"):
                for how in ("generate", "generate_stream"):
                    _, answer = _http(ports, f"models/{model}/{how}", body, inference_key=KEY)
                    assert "Traceback" not in answer
                    assert "/" + built.name not in answer
        log = server.log.path.read_text()
        server.kill()
    assert re.search("Started GRPCInferenceService", log)
    for text in (secret, KEY, security.own_key, security.client_key):
        assert text not in log
