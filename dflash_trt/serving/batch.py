"""Answers to a file of requests, in the form of OpenAI's batches.

A line of the first file has `custom_id`, `method`, `url` and `body`; one of the second `id`,
`custom_id`, `response` (`status_code`, `request_id`, `body`) and `error`. A line is appended
whole once its answer is here, so that a killed batch continues: half a line is cut off.
"""

import asyncio
import fcntl
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from dflash_trt.errors import RequestError, ServerError
from dflash_trt.files import parse_json
from dflash_trt.serving.remote import client_options

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
DEFAULT_CONCURRENCY = 64  # of a server that does not tell its slots
PER_SLOT = 2  # requests: one runs, one waits
BUSY = (429, 502, 503)  # statuses of a server that may take the request later
ATTEMPTS = 3  # of a request at which the server fails
PATIENCE = 120.0  # seconds without any answer until the batch gives up
PAUSES = (0.1, 10.0)  # seconds: shortest and longest wait of a request that was not taken
ANSWER_TIME = 3600.0  # seconds for one answer
CONNECT_TIME = 10.0

Report = Callable[[str, int, int], None]  # step, parts done, parts in all
Json = dict[str, Any]


@dataclass(frozen=True)
class Line:
    custom_id: str
    url: str
    body: Json


@dataclass
class Done:
    requests: int
    before: int  # answered by an earlier run
    answered: int
    failed: int = 0
    tokens: int = 0  # that were generated
    seconds: float = 0.0


def run_batch(
    requests: Path,
    answers: Path,
    url: str,
    key_file: Path | None,
    concurrency: int | None,
    report: Report,
) -> Done:
    """Answer all requests; RequestError for a wrong file, ServerError without a server."""
    lines = read_requests(requests)
    options = client_options(url, key_file)
    with open_answers(answers) as output:
        earlier = read_answers(answers, output)
        unknown = earlier.keys() - {line.custom_id for line in lines}
        if unknown:
            raise RequestError(
                f"{answers} has an answer to {min(unknown)!r}, which {requests} does not ask",
                "Give another file for the answers",
            )
        failed = sum(earlier.values())
        done = Done(len(lines), len(earlier), len(earlier) - failed, failed)
        left = [line for line in lines if line.custom_id not in earlier]
        if left:
            run = _Run(left, output, done, report)
            asyncio.run(run.answer_all(options, concurrency))
    return done


def read_requests(file: Path) -> list[Line]:
    """Read a batch; RequestError names the first line that is none, before anything is sent."""
    lines: dict[str, Line] = {}
    try:
        with file.open("rb") as stream:
            for number, text in enumerate(stream, 1):
                if text.strip():
                    line = _read_request(text, f"{file}:{number}")
                    if line.custom_id in lines:
                        problem = f"{file}:{number}: custom_id {line.custom_id!r} is there twice"
                        raise RequestError(problem, "Give each request its own")
                    lines[line.custom_id] = line
    except OSError as error:
        raise RequestError(
            f"cannot read {file}: {error.strerror}", "Give a file of JSON lines"
        ) from error
    if not lines:
        raise RequestError(f"{file} holds no request", "Give a file of JSON lines")
    return list(lines.values())


def _read_request(text: bytes, place: str) -> Line:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise RequestError(f"{place} is not JSON ({error})", "Correct the line") from None
    fields = value if isinstance(value, dict) else {}
    custom_id, url, body = (fields.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"{place} has no custom_id", "Give each request a text of its own")
    if fields.get("method") != "POST" or url not in URLS:
        raise RequestError(
            f"{place}: method and url are {fields.get('method')!r} and {url!r}",
            f"Give POST, and one of {', '.join(URLS)}",
        )
    if not isinstance(body, dict):
        raise RequestError(f"{place} has no body", "Give the request's fields as its body")
    if body.get("stream"):
        raise RequestError(f"{place}: stream is true", "Leave it out: a line has a whole answer")
    return Line(custom_id, url, body)


@contextmanager
def open_answers(file: Path) -> Iterator[BinaryIO]:
    """Open the file for appending, for this process alone."""
    try:
        stream = file.open("ab", buffering=0)
    except OSError as error:
        raise RequestError(
            f"cannot write {file}: {error.strerror}", "Give a file in a folder that is there"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"another batch writes {file}", "Wait for it, or give another file"
            ) from None
        yield stream


def read_answers(file: Path, output: BinaryIO) -> dict[str, bool]:
    """Return whether each answer failed, by custom_id; cut off a line that was not finished."""
    answers: dict[str, bool] = {}
    size = 0
    with file.open("rb") as stream:
        for number, text in enumerate(stream, 1):
            if not text.endswith(b"\n"):
                break
            size += len(text)
            try:
                value = parse_json(text)
                custom_id = str(value["custom_id"])
                answers[custom_id] = not _is_answered(value)
            except (ValueError, KeyError, TypeError):
                raise RequestError(
                    f"{file}:{number} is no answer of a batch", "Give another file for the answers"
                ) from None
    os.truncate(output.fileno(), size)
    return answers


def _is_answered(answer: Json) -> bool:
    response = answer.get("response")
    return response is not None and response["status_code"] == 200


class _Busy(Exception):
    """The server did not take a request; the argument is how long it asks to wait."""


class _Run:
    def __init__(self, lines: list[Line], output: BinaryIO, done: Done, report: Report) -> None:
        self._lines = iter(lines)
        self._output = output
        self._done = done
        self._report = report
        self._last_answer = time.monotonic()

    async def answer_all(self, options: Json, concurrency: int | None) -> None:
        started = time.monotonic()
        self._show()
        async with _connected(options) as client:
            if concurrency is None:
                concurrency = await _concurrency(client)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(self._work(client))
            except ExceptionGroup as error:
                raise error.exceptions[0] from None
        self._done.seconds = round(time.monotonic() - started, 3)

    async def _work(self, client: httpx.AsyncClient) -> None:
        for line in self._lines:
            self._write(await self._answer(client, line))

    async def _answer(self, client: httpx.AsyncClient, line: Line) -> Json:
        """Return a line's answer; waits while the server is busy, starting or away."""
        failures, pause = 0, PAUSES[0]
        while True:
            try:
                answer = await client.post(line.url, json=line.body)
                self._last_answer = time.monotonic()
                if answer.status_code == 401:
                    raise ServerError("the server wants another key", "Give it: --key-file")
                if answer.status_code in BUSY:
                    raise _Busy(float(answer.headers.get("retry-after", 0) or 0))
                failures += answer.status_code >= 500
                if answer.status_code < 500 or failures == ATTEMPTS:
                    return _answered(line, answer)
            except httpx.TransportError as error:
                if time.monotonic() - self._last_answer > PATIENCE:
                    raise ServerError(
                        f"the server has not answered for {PATIENCE:.0f} s ({error})",
                        "Start it and run the same command again: it continues",
                    ) from None
            except _Busy as busy:
                pause = max(pause, float(busy.args[0]))
            await asyncio.sleep(min(pause, PAUSES[1]))
            pause = min(2 * pause, PAUSES[1])

    def _write(self, answer: Json) -> None:
        """Append a line at once; the next run cuts off what was not finished."""
        text = memoryview(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        while text:
            text = text[self._output.write(text) :]
        done = self._done
        if _is_answered(answer):
            done.answered += 1
            usage = answer["response"]["body"].get("usage") or {}
            done.tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        else:
            done.failed += 1
        self._show()

    def _show(self) -> None:
        done = self._done
        self._report("requests", done.answered + done.failed, done.requests)


@asynccontextmanager
async def _connected(options: Json) -> AsyncIterator[httpx.AsyncClient]:
    timeout = httpx.Timeout(ANSWER_TIME, connect=CONNECT_TIME)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(**options, timeout=timeout, limits=limits) as client:
        yield client


async def _concurrency(client: httpx.AsyncClient) -> int:
    """Return how many requests keep all slots busy, by what the server tells of itself."""
    try:
        answer = await client.get("/page/server", timeout=CONNECT_TIME)
        slots = answer.json()["slots"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        slots = None
    return PER_SLOT * slots if isinstance(slots, int) and slots > 0 else DEFAULT_CONCURRENCY


def _answered(line: Line, answer: httpx.Response) -> Json:
    response, error = None, None
    try:
        body = answer.json()
        request_id = answer.headers.get("x-request-id", "")
        status = answer.status_code
        response = {"status_code": status, "request_id": request_id, "body": body}
    except ValueError:
        message = f"HTTP {answer.status_code} without JSON: {answer.text[:200]}"
        error = {"code": "invalid_response", "message": message}
    head = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    return {**head, "response": response, "error": error}
