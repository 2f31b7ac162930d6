"""Health checks of a running server over HTTP: whether it is ready, answers, and runs rounds.

Connections stay open: a server without free file descriptors still answers on them.
"""

import json
from typing import Any

import httpx

from dflash_trt.serving.internal import PROOF, client_parameters
from dflash_trt.serving.ports import LOOPBACK, Ports
from dflash_trt.serving.security import Security

# one token, through the whole path of a request
PROBE = {
    "inputs": [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [1]},
    ]
}
OK = 200
TIMEOUT = 2.0  # seconds, for requests that need no model


class Health:
    """Connections to the server on these ports; no method raises if it does not answer."""

    def __init__(self, ports: Ports, security: Security) -> None:
        self._client_key = security.client_key  # see `internal.client_parameters`
        self._client = httpx.Client(
            base_url=f"http://{LOOPBACK}:{ports.http}/v2/",
            headers=security.http_headers,
            trust_env=False,  # no proxy
            limits=httpx.Limits(keepalive_expiry=None),
        )

    def is_ready(self) -> bool:
        """Return Triton's own readiness, which stays when model processes die."""
        return self._ask("GET", "health/ready", TIMEOUT)[0] == OK

    def probe(self, timeout: float) -> int | None:
        """Return the HTTP status of a one-token request; None without an answer in `timeout` s."""
        return self.post("models/dflash_infer/infer", PROBE, timeout)

    def post(self, path: str, body: object, timeout: float) -> int | None:
        """Return the HTTP status; None without an answer in `timeout` seconds."""
        return self._ask("POST", path, timeout, body)[0]

    def generate(self, text: str, max_tokens: int, timeout: float) -> dict[str, list[Any]] | None:
        """Return the output tensors of a greedy request drafted in every round; None on failure."""
        inputs = [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [max_tokens]},
            {"name": "ignore_eos", "shape": [1], "datatype": "BOOL", "data": [True]},
        ]
        body = {"inputs": inputs, "parameters": client_parameters(PROOF, self._client_key)}
        status, answer = self._ask("POST", "models/dflash_infer/infer", timeout, body)
        if status != OK:
            return None
        return {each["name"]: each["data"] for each in json.loads(answer)["outputs"]}

    def load(self, model: str, config: object, timeout: float) -> str | None:
        """Reload a model with another config; return the error, or None."""
        body = {"parameters": {"config": json.dumps(config)}}
        status, answer = self._ask("POST", f"repository/models/{model}/load", timeout, body)
        return None if status == OK else answer or "it did not answer"

    def config(self, model: str) -> dict[str, Any] | None:
        """Return a model's config; None without an answer."""
        status, answer = self._ask("GET", f"models/{model}/config", TIMEOUT)
        return json.loads(answer) if status == OK else None

    def close(self) -> None:
        """Close the connections, which a stopping server would wait for."""
        self._client.close()

    def _ask(
        self, method: str, url: str, timeout: float, body: object = None
    ) -> tuple[int | None, str]:
        try:
            response = self._client.request(method, url, json=body, timeout=timeout)
        except (httpx.HTTPError, RuntimeError):  # closed meanwhile
            return None, ""
        return response.status_code, response.text
