"""HTTP by which `serve` asks the application and its Triton."""

import json
import ssl
from pathlib import Path
from typing import Any

import httpx

from dflash_trt.serving.keys import MEASURING_CLIENT, client_parameters
from dflash_trt.serving.ports import LOOPBACK, Ports
from dflash_trt.serving.security import Security

HTTP_TIMEOUT = 2.0  # seconds, for requests that need no model
OK, UNAVAILABLE = 200, 503


class ApplicationClient:
    """The application on this port, as its clients find it; no method raises."""

    def __init__(self, http_port: int, security: Security) -> None:
        cert = security.http_tls.cert if security.http_tls else None
        self._client = _new_client(f"{security.http_url}:{http_port}", security, cert)

    def is_alive(self, timeout: float) -> bool:
        """Return whether the application answers at all within `timeout` seconds."""
        try:
            self._client.get("/health", timeout=timeout)
        except (httpx.HTTPError, RuntimeError):  # closed meanwhile
            return False
        return True

    def probe(self, timeout: float) -> int | None:
        """Return the HTTP status of a one-token request; None without an answer in `timeout` s."""
        request = {"model": "dflash", "prompt": "a", "max_tokens": 1, "ignore_eos": True}
        try:
            return self._client.post("/v1/completions", json=request, timeout=timeout).status_code
        except (httpx.HTTPError, RuntimeError):
            return None

    def close(self) -> None:
        self._client.close()


class TritonClient:
    """The Triton server on these ports; no method raises if it does not answer."""

    def __init__(self, ports: Ports, security: Security) -> None:
        self._client_key = security.client_key  # see `client_parameters`
        self._client = _new_client(f"http://{LOOPBACK}:{ports.http}/v2/", security)

    def is_ready(self) -> bool:
        """Return Triton's own readiness, which stays when model processes die."""
        return self._ask("GET", "health/ready", HTTP_TIMEOUT)[0] == OK

    def probe(self, timeout: float) -> int | None:
        """Return the HTTP status of a one-token request; None without an answer in `timeout` s."""
        return self._infer("a", 1, timeout)[0]

    def generate(self, text: str, max_tokens: int, timeout: float) -> dict[str, list[Any]] | None:
        """Return the output tensors of a greedy request drafted in every round; None on failure."""
        measuring = client_parameters(MEASURING_CLIENT, self._client_key)
        status, answer = self._infer(text, max_tokens, timeout, measuring)
        if status != OK:
            return None
        return {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}

    def end_readiness(self) -> None:
        """Have Triton say that it is not ready, while it answers everything.

        It says so after a model failed to load, so a model that cannot load is loaded on purpose.
        """
        config = {"backend": "none", "max_batch_size": 0}
        parameters = {"config": json.dumps(config), "file:1/none": ""}
        body = {"parameters": parameters}
        self._ask("POST", "repository/models/leaving/load", HTTP_TIMEOUT, body)

    def close(self) -> None:
        """Close the connections, which a stopping server would wait for."""
        self._client.close()

    def _infer(
        self, text: str, max_tokens: int, timeout: float, parameters: dict[str, str] | None = None
    ) -> tuple[int | None, str]:
        inputs = [
            {"name": name, "shape": [1], "datatype": datatype, "data": [value]}
            for name, datatype, value in (
                ("text_input", "BYTES", text),
                ("max_tokens", "INT32", max_tokens),
                ("ignore_eos", "BOOL", True),
            )
        ]
        body = {"inputs": inputs, "parameters": parameters or {}}
        return self._ask("POST", "models/dflash_infer/infer", timeout, body)

    def _ask(
        self, method: str, url: str, timeout: float, body: object = None
    ) -> tuple[int | None, str]:
        try:
            response = self._client.request(method, url, json=body, timeout=timeout)
        except (httpx.HTTPError, RuntimeError):  # closed meanwhile
            return None, ""
        return response.status_code, response.text


def _new_client(url: str, security: Security, cert: Path | None = None) -> httpx.Client:
    """Return a client that shows the key of `serve`; cert: the server's, over TLS."""
    return httpx.Client(
        base_url=url,
        verify=_trust(cert) if cert else False,
        headers=security.http_headers,
        trust_env=False,  # no proxy
        # a server without free file descriptors still answers on an open connection
        limits=httpx.Limits(keepalive_expiry=None),
    )


def _trust(cert: Path) -> ssl.SSLContext:
    """Return a context that takes this certificate alone, by whatever name it is called."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context
