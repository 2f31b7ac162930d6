"""The application's HTTP port as its clients find it, asked by `serve`."""

import ssl
from pathlib import Path

import httpx

from dflash_trt.serving.security import Security

OK = 200


class Door:
    """HTTP to the application on this port; no method raises if it does not answer."""

    def __init__(self, http_port: int, security: Security) -> None:
        self._client = httpx.Client(
            base_url=f"{security.http_url}:{http_port}",
            verify=_trust(security.http_tls.cert) if security.http_tls else False,
            headers=security.http_headers,
            trust_env=False,  # no proxy
            # a server without free file descriptors still answers on an open connection
            limits=httpx.Limits(keepalive_expiry=None),
        )

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


def _trust(cert: Path) -> ssl.SSLContext:
    """Return a context that takes this certificate alone, by whatever name it is called."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context
