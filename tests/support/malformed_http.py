"""HTTP requests that are wrong in every layer, by seed and number, and what may come back.

They go as raw bytes: a client's library would not send most of them.
"""

import random
import re
import socket
import time
from dataclasses import dataclass
from typing import Any

from dflash_trt.serving.http.guard import BODY_LIMIT
from tests.support.strategies import spoil_json, text_of

HOST = "127.0.0.1"
WAIT = 60.0
A = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
THREE = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [3]}
BODIES: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (  # of Triton, of OpenAI
    (
        ("/v2/models/dflash_infer/infer", {"inputs": [A, THREE], "outputs": [{"name": "index"}]}),
        ("/v2/models/dflash/infer", {"inputs": [A, THREE], "id": "1", "parameters": {}}),
        ("/v2/models/dflash/generate", {"text_input": "a", "max_tokens": 3, "stop_words": ["x"]}),
        ("/v2/models/dflash/generate_stream", {"text_input": "a", "max_tokens": 3, "stream": True}),
        ("/v2/models/verify/infer", {"inputs": [A]}),
        ("/v2/repository/models/dflash/load", {"parameters": {"config": "{}"}}),
        ("/v2/systemsharedmemory/region/x/register", {"key": "/x", "byte_size": 1}),
        ("/v2/logging", {"log_verbose_level": 1}),
    ),
    (
        ("/v1/completions", {"model": "dflash", "prompt": "a", "max_tokens": 3, "stop": ["x"]}),
        ("/v1/completions", {"model": "dflash", "prompt": "a", "max_tokens": 3, "stream": True}),
        (
            "/v1/chat/completions",
            {"model": "dflash", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
        ),
        ("/v1/models", {}),
        ("/health", {}),
    ),
)
LINES = (
    *(b"", b"GET", b"GET / HTTP/9.9\r\n\r\n", b"\x00\xff" * 50, b"\x16\x03\x01\x02", b"\r\n" * 9),
    *(b"GET  /v2 HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET " + b"/a" * 50_000),
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 9000 + b"\r\n",
    b"GET /v2 HTTP/1.1\r\n: x\r\n\r\n",
)
PATHS = ("%00", "/..", "%2e%2e/", "?a=b", "#", "//", ";x", "/versions/1/infer", "\\", "%")
HEADERS = (
    *("Inference-Header-Content-Length: 0", "Inference-Header-Content-Length: 9999999"),
    *("Inference-Header-Content-Length: x", "Content-Encoding: gzip", "Content-Encoding: zstd"),
    *("Expect: 100-continue", "Expect: x", "Upgrade: websocket\r\nConnection: upgrade", "A: \x01"),
    *("Content-Type: text/plain", "Content-Type: multipart/form-data", "Content-Length: -1"),
    *("Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: gzip", "Host: y", " folded: x"),
    *("Authorization: Bearer \xe9", "inference-key: \xe9", "Cookie: " + "x" * 9000, "own-key: x"),
)


@dataclass(frozen=True)
class Wrong:
    sent: bytes
    framed: bool  # a whole request in good HTTP, which must have an answer
    short: bool = False  # the server might wait for more


@dataclass(frozen=True)
class Outcome:
    status: int | None
    seconds: float
    answer: bytes


def request(seed: int, number: int) -> Wrong:
    rng = random.Random(f"{seed} {number}")
    bodies = rng.choice(BODIES)
    if rng.random() < 0.05:
        return Wrong(rng.choice(LINES), False, True)
    path, body = rng.choice(bodies)
    if rng.random() < 0.1:
        path += rng.choice(PATHS)
    content = text_of(body)
    if rng.random() < 0.9:
        content = spoil_json(content, rng)
    method = rng.choice(("GET", "PUT", "HEAD", "OPTIONS", "BREW")) if rng.random() < 0.1 else "POST"
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    framed, short = True, False
    if rng.random() < 0.85 and "Content-Type" not in lines:
        lines.append("Content-Type: application/json")
    if rng.random() < 0.2:
        lines.append(rng.choice(HEADERS))
        framed = False  # some are no HTTP
    how = rng.random()
    if how < 0.7:
        lines.append(f"Content-Length: {len(content)}")
    elif how < 0.8:
        lines.append("Transfer-Encoding: chunked")
        size = rng.choice((1, 7, 1000))
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        content = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"
        framed = framed and len(pieces) < 5000
    elif how < 0.9:
        lines.append(f"Content-Length: {max(0, len(content) + rng.choice((-1, 1, 10**9, 10**30)))}")
        short = True
    else:
        lines.append("Transfer-Encoding: chunked")
        short = True
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")
    return Wrong(head + content, framed and not short, short)


def send(wrong: Wrong, port: int) -> Outcome:
    """Send it, close the sending end, and return all that comes back."""
    begun = time.monotonic()
    answer = bytearray()
    with socket.create_connection((HOST, port), timeout=WAIT) as connection:
        try:
            connection.sendall(wrong.sent)
            if wrong.short:
                connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(65536):
                answer += received
        except OSError:
            pass  # closed while we were sending
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"))
    return Outcome(int(found[1]) if found else None, time.monotonic() - begun, bytes(answer))


def fault(wrong: Wrong, outcome: Outcome, longest: float) -> str:
    if outcome.seconds > longest:
        return f"took {outcome.seconds:.1f} s"
    if b"Traceback" in outcome.answer or b".py" in outcome.answer:
        return "shows its inside"
    if outcome.status is None:
        # one that is far too long is closed before it was all sent
        return "no answer" if wrong.framed and len(wrong.sent) < BODY_LIMIT else ""
    body = outcome.answer.partition(b"\r\n\r\n")[2]
    # the server's own failure is told so, and nothing else
    if outcome.status >= 500 and outcome.status != 503 and b'"error"' not in body:
        return f"status {outcome.status} without a sentence"
    return ""
