"""What `serve` asks its own processes over HTTP."""

from contextlib import closing

import pytest

from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.supervisor.clients import ApplicationClient, TritonClient
from tests.standins.triton_http import fake_triton

WAIT = 30.0


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_serve_asks_its_processes_without_a_proxy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Companies set one for all programs."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    with fake_triton() as triton:
        with closing(ApplicationClient(triton.port, Security())) as client:
            assert client.is_alive(WAIT)
        with closing(TritonClient(Ports(triton.port, 1, 1), Security())) as health:
            assert health.is_ready()
