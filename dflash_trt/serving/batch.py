"""Answers to a file of requests, in the form of OpenAI's batches.

A line of the first file has `custom_id`, `method`, `url` and `body`; one of the second `id`,
`custom_id`, `response` (`status_code`, `request_id`, `body`) and `error`. A line is appended
whole once its answer is here, so that a killed batch continues: half a line is cut off.
"""

import asyncio
import fcntl
import json
import math
import os
import stat
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from dflash_trt.errors import RequestError, ServerError
from dflash_trt.files import open_regular, parse_json
from dflash_trt.serving.lines import own_descriptor
from dflash_trt.serving.remote import client_options
from dflash_trt.serving.strict_json import parse_object

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
DEFAULT_CONCURRENCY = 64  # of a server that does not tell its slots
PER_SLOT = 2  # requests: one runs, one waits
BUSY = (429, 502, 503)  # statuses of a server that may take the request later
ATTEMPTS = 3  # of a request at which the server fails
PATIENCE = 120.0  # seconds without any answer until the batch gives up
PAUSES = (0.1, 10.0)  # seconds: shortest and longest wait of a request that was not taken
ANSWER_TIME = 3600.0  # seconds for one answer
CONNECT_TIME = 10.0
READER_TIME = 10.0  # seconds for a named pipe's reader to come
LONGEST = 2**26  # bytes of a line
BEGIN = b'{"id": "batch_req_'  # of an answer

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
    _refuse_one_file(requests, answers)
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
            run = _Run(left, output, done, report, answers)
            asyncio.run(run.answer_all(options, concurrency))
    return done


def read_requests(file: Path) -> list[Line]:
    """Read a batch; RequestError names the first line that is none, before anything is sent."""
    lines: dict[str, Line] = {}
    try:
        with file.open("rb") as stream:
            for number, text in enumerate(_lines_of(stream), 1):
                if text.strip():
                    place = f"line {number} of {file}"
                    line = _read_request(text, place)
                    if line.custom_id in lines:
                        problem = f"{place}: custom_id {line.custom_id!r} is there twice"
                        raise RequestError(problem, "Give each request its own")
                    lines[line.custom_id] = line
    except OSError as error:
        raise RequestError(
            f"cannot read {file}: {error.strerror}", "Give a file of JSON lines"
        ) from error
    if not lines:
        raise RequestError(f"{file} holds no request", "Give a file of JSON lines")
    return list(lines.values())


def _lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines, which a device may have without end."""
    while line := stream.readline(LONGEST):
        yield line


def _read_request(text: bytes, place: str) -> Line:
    if len(text) == LONGEST:
        raise RequestError(f"{place} has more than {LONGEST >> 20} MiB", "Give JSON lines")
    try:
        fields = parse_object(text)
    except RequestError as error:
        raise RequestError(f"{place}: {error.problem}", error.fix) from None
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


def _refuse_one_file(requests: Path, answers: Path) -> None:
    """Raise RequestError if both are the same file, by whatever names."""
    with suppress(OSError):  # the answers' file is not there yet
        if requests.samefile(answers) and requests.stat().st_rdev == 0:
            raise RequestError(
                f"{answers} is the file of the requests", "Give another file for the answers"
            )


@contextmanager
def open_answers(file: Path) -> Iterator[BinaryIO]:
    """Open the file for appending, for this process alone; also a pipe or a device."""
    try:
        stream = open(_open_for_answers(file), "ab", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise RequestError(
            f"cannot write {file}: {error.strerror}", "Give a file in a folder that is there"
        ) from error
    with stream:
        if is_plain(stream):
            _lock(stream, file)
        yield stream


def _lock(stream: BinaryIO, file: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(
            f"another batch writes {file}", "Wait for it, or give another file"
        ) from None
    except OSError as error:
        raise RequestError(
            f"cannot lock {file}: {error.strerror}", "Give a file on another disk"
        ) from error


def is_plain(stream: BinaryIO) -> bool:
    """Return whether what was written can be read again."""
    return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def is_standard_output(file: Path) -> bool:
    """Return whether what this command prints would come among the answers."""
    with suppress(OSError):
        return os.path.samestat(file.stat(), os.fstat(1)) and not file.samefile(os.devnull)
    return False


def _open_for_answers(file: Path) -> int:
    descriptor = own_descriptor(file)
    if descriptor is not None:
        return os.dup(descriptor)  # by its path a socket could not be opened
    if file.is_block_device():
        raise RequestError(f"{file} is a disk", "Give a file for the answers")
    if not file.is_fifo():
        return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o666)
    deadline = time.monotonic() + READER_TIME
    while time.monotonic() < deadline:
        with suppress(OSError):  # it has no reader
            descriptor = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            return descriptor
        time.sleep(PAUSES[0])
    raise RequestError(f"nobody reads the pipe {file}", "Start its reader first")


def read_answers(file: Path, output: BinaryIO) -> dict[str, bool]:
    """Return whether each answer failed, by custom_id; cut off a line that was not finished."""
    answers: dict[str, bool] = {}
    if not is_plain(output):
        return answers
    size = 0
    with open_regular(file) as stream:
        for number, text in enumerate(stream, 1):
            try:
                if text.endswith(b"\n"):
                    size += len(text)
                    answer = _read_answer(text)
                    answers[answer["custom_id"]] = not _is_answered(answer)
                elif not (text.startswith(BEGIN) or BEGIN.startswith(text)):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise RequestError(
                    f"line {number} of {file} is no answer of a batch",
                    "Give another file for the answers: the requests come first, then the answers",
                ) from None
    os.truncate(output.fileno(), size)
    return answers


def _read_answer(text: bytes) -> Json:
    """Return an answer of a batch; ValueError, KeyError or TypeError for anything else."""
    answer: Json = parse_json(text)
    if not isinstance(answer["custom_id"], str) or answer["response"] is answer["error"] is None:
        raise ValueError
    return answer


def _is_answered(answer: Json) -> bool:
    response = answer["response"]
    return response is not None and response["status_code"] == 200


class _Busy(Exception):
    """The server did not take a request; the argument is how long it asks to wait."""


class _Run:
    def __init__(
        self, lines: list[Line], output: BinaryIO, done: Done, report: Report, file: Path
    ) -> None:
        self._lines = iter(lines)
        self._output = output
        self._file = file  # of the output
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
                    raise _Busy(_retry_after(answer))
                failures += answer.status_code >= 500
                if answer.status_code < 500 or failures == ATTEMPTS:
                    return _answered(line, answer)
            except httpx.DecodingError as error:
                return _unreadable(line, f"the answer cannot be read: {error}")
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
        try:
            while text:
                text = text[self._output.write(text) or 0 :]
        except OSError as error:
            raise ServerError(
                f"cannot write {self._file}: {error.strerror}",
                "Give it room or a reader, and run the same command again",
            ) from None
        done = self._done
        if _is_answered(answer):
            done.answered += 1
            done.tokens += _tokens_of(answer["response"]["body"])
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
        slots = parse_object(answer.content)["slots"] if answer.status_code == 200 else None
    except (httpx.HTTPError, RequestError, KeyError):
        slots = None
    return PER_SLOT * slots if isinstance(slots, int) and slots > 0 else DEFAULT_CONCURRENCY


def _retry_after(answer: httpx.Response) -> float:
    """Return the seconds that a server asks to wait, 0 if it names none (or a date)."""
    with suppress(ValueError):
        seconds = float(answer.headers.get("retry-after", 0))
        return seconds if math.isfinite(seconds) else 0.0
    return 0.0


def _tokens_of(body: Json) -> int:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return 0
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    return count if isinstance(count, int) else 0


def _answered(line: Line, answer: httpx.Response) -> Json:
    try:
        body = parse_object(answer.content)
    except RequestError:  # or JSON that a line cannot say again
        return _unreadable(line, f"HTTP {answer.status_code} without JSON: {answer.text[:200]}")
    request_id = answer.headers.get("x-request-id", "")
    response = {"status_code": answer.status_code, "request_id": request_id, "body": body}
    return {**_head(line), "response": response, "error": None}


def _unreadable(line: Line, message: str) -> Json:
    error = {"code": "invalid_response", "message": message}
    return {**_head(line), "response": None, "error": error}


def _head(line: Line) -> Json:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
