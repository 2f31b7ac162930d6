"""Everything that can go wrong at once, on `dflash-trt serve`: then it must answer as before."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import load
import malformed
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from load import (
    HOST,
    NO_CONNECTION,
    NO_STATUS,
    WAIT,
    Client,
    Expected,
    Job,
    RefusedError,
    ask_all,
    fill,
)
from malformed import Answer, Request
from tiny import LONGEST_TEXT, alone, build_pair, length, make_prompts, write_pair
from tritonclient.grpc import service_pb2_grpc
from watched import Served, goes_idle, watched

from dflash_trt.serving.ports import Ports

pytestmark = pytest.mark.soak

SLOTS, MAX_QUEUE = 16, 16
CLIENTS = 30
MALFORMED, SENDERS = 1000, 5
KILLED_CLIENTS, STREAMS = 6, 12  # streams of each
AT_LEAST = {  # it goes on until all of this has happened
    "right": 200,
    "cancelled by its client": 100,
    "ended by its deadline": 20,
    "refused": 20,
}
LAST = 240.0  # seconds in which it has
LONG = "é" * 5_000_000  # 10 MB
OUTAGE_END = 2.0  # seconds after "ready again" in which a client may not have connected again
PROMPTS = make_prompts(24)


@contextmanager
def serving(built: Path) -> Iterator[Served]:
    with watched(built) as served:
        served.wait_for("Ctrl-C")
        yield served
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WAIT) == 0, served.said


class Chaos:
    """What goes on at once, until all of it has had its turn."""

    def __init__(self, served: Served, expected: Expected) -> None:
        self.served, self.expected = served, expected
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0  # seconds to an answer or an error
        self.killed: float | None = None  # when `draft` was
        self.over = asyncio.Event()

    async def run(self) -> None:
        workers = [asyncio.ensure_future(self.client(i)) for i in range(CLIENTS)]
        turns = [
            *(self.happens(*each) for each in AT_LEAST.items()),
            self.overfill(),
            self.kill_draft(),
            self.kill_clients(),
            self.send_long_prompts(),
            self.send_bad_tensors(),
            *(asyncio.to_thread(self.send_malformed, i) for i in range(SENDERS)),
        ]
        try:
            await asyncio.gather(*turns)
        finally:
            self.over.set()
            await asyncio.gather(*workers)

    async def happens(self, what: str, times: int) -> None:
        deadline = time.monotonic() + LAST
        while self.outcomes[what] < times:
            assert time.monotonic() < deadline, (what, self.outcomes)
            await asyncio.sleep(0.05)

    def excuse(self, error: RefusedError | Answer, asked: float) -> None:
        """Fails for an error that this server should not have given to who `asked` it then.

        While the killed process is replaced, any is right; else only a full queue's.
        """
        code, message, ready = error.code, error.message, self.served.when("ready again")
        outage = self.killed is not None and (ready is None or asked <= ready + OUTAGE_END)
        refused = "Try again later." in message and "queue is full" in message
        self.discreet(message)
        assert outage or refused, (code, message)
        self.outcomes["refused" if refused else f"outage: {code}"] += 1

    def discreet(self, message: str) -> None:
        """No traceback, no path of the server."""
        assert not re.search(r"\.py\W+\d|, line \d", message), message
        assert str(self.served.built) not in message, message

    async def client(self, name: int) -> None:
        """Asks, often cancels, sometimes with a deadline; what it gets whole must be right."""
        random_, number = random.Random(name), 0
        roads = [*load.ROADS]
        async with Client(self.served.ports.grpc, self.served.ports.http) as client:
            while not self.over.is_set():
                job = Job(
                    name << 32 | number,
                    random_.choice(roads),
                    random_.choice(PROMPTS),
                    length(random_, LONGEST_TEXT),
                    random_.choice([0.001, 0.02, 0.2]) if random_.random() < 0.15 else None,
                )
                number += 1
                cancel = random_.random() < 0.3
                start = time.monotonic()
                asking = asyncio.ensure_future(ask_all(client, job))
                await asyncio.wait([asking], timeout=random_.uniform(0, 0.3) if cancel else WAIT)
                assert cancel or asking.done(), f"no answer to {job}"
                asking.cancel()
                try:
                    parts = await asking
                except asyncio.CancelledError:
                    self.outcomes["cancelled by its client"] += 1
                except RefusedError as error:
                    self.excuse(error, start)
                    await asyncio.sleep(0.1)
                else:
                    self.expected.check(job, parts, cut=job.deadline is not None)
                    reason = parts[-1].finish_reason[0]
                    self.outcomes["right" if reason == "length" else "ended by its deadline"] += 1
                self.slowest = max(self.slowest, time.monotonic() - start)

    async def overfill(self) -> None:
        """Three times as many sequences at once as have a slot: a third of them finds no room."""
        job = Job(0, "grpc stream, one response", PROMPTS[1], LONGEST_TEXT, more={"n": SLOTS})
        async with Client(self.served.ports.grpc) as client:
            while self.outcomes["refused"] < AT_LEAST["refused"] and not self.over.is_set():
                start = time.monotonic()
                asked = [asyncio.wait_for(ask_all(client, job), WAIT) for _ in range(3)]
                for answer in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(answer, RefusedError):
                        self.excuse(answer, start)
                    elif isinstance(answer, BaseException):
                        raise answer
                    else:
                        assert answer[0].token_ids == self.expected.tokens[job.prompt] * SLOTS
                await asyncio.sleep(0.1)

    async def kill_draft(self) -> None:
        await self.happens("right", 50)
        pid = _model_process(self.served.built, "draft")
        self.killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self.served.wait_for, "ready again")
        await self.happens("right", self.outcomes["right"] + 100)

    async def kill_clients(self) -> None:
        """kill -9 while their streams run."""
        for _ in range(KILLED_CLIENTS):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, load.__file__, str(self.served.ports.grpc), str(STREAMS)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert process.stdout is not None
            try:
                said = await asyncio.wait_for(process.stdout.readline(), WAIT)
                assert said == b"open\n"
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()
            self.outcomes["clients killed"] += 1

    async def send_long_prompts(self) -> None:
        """10 MB over gRPC, in every input that may be long."""
        async with Client(self.served.ports.grpc) as client:
            chat = f'[{{"role": "user", "content": "{LONG}"}}]'
            for number in range(4):
                for road in ("grpc stream", "grpc infer"):
                    for prompt, more in ((LONG, {}), ("", {"messages": chat})):
                        job = Job(number, road, prompt, 3, more=more)
                        await self.refused(client, job, "long prompts", "Send at most")

    async def refused(self, client: Client, job: Job, what: str, words: str) -> None:
        """It must be refused as a bad request, however long the server takes to come back."""
        deadline = time.monotonic() + WAIT
        while True:
            start = time.monotonic()
            try:
                parts = await asyncio.wait_for(ask_all(client, job), WAIT)
            except RefusedError as error:
                if error.code in ("INVALID_ARGUMENT", NO_STATUS) and words in error.message:
                    self.outcomes[what] += 1
                    return
                self.excuse(error, start)
            else:
                raise AssertionError(parts)
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    async def send_bad_tensors(self) -> None:
        def send_all() -> None:
            with _stub_of(self.served.ports) as stub:
                for _ in range(3):
                    for name, tensors in malformed.BAD_TENSORS.items():
                        for stream in (False, True):
                            request = Request("dflash_infer", tensors=tensors)
                            if stream:
                                request = Request("dflash", stream=True, tensors=tensors)
                            answer = self.reach(request, stub)
                            code = NO_STATUS if stream else "INVALID_ARGUMENT"
                            assert answer.code == code, (name, answer)
                            self.outcomes["bad tensors"] += 1

        await asyncio.to_thread(send_all)

    def send_malformed(self, number: int) -> None:
        with _stub_of(self.served.ports) as stub:

            @seed(number)
            @settings(
                max_examples=MALFORMED // SENDERS,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(malformed.requests)
            def one(request: Request) -> None:
                answer = self.reach(request, stub)
                self.outcomes[f"malformed: {answer.code}"] += 1
                self.discreet(answer.message)

            one()

    def reach(self, request: Request, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> Answer:
        """The answer to it, once the server is there and has room."""
        deadline = time.monotonic() + WAIT
        while True:
            start = time.monotonic()
            answer = malformed.send(request, self.served.ports, stub)
            full = "queue is full" in answer.message
            lost = answer.code in (NO_CONNECTION, "UNAVAILABLE")
            if not (full or lost):
                return answer
            self.excuse(answer, start)
            assert time.monotonic() < deadline
            assert not self.over.is_set(), "something else failed"
            time.sleep(0.1)


@contextmanager
def _stub_of(ports: Ports) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(f"{HOST}:{ports.grpc}", load.CHANNEL) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def _model_process(built: Path, model: str) -> int:
    script = str(built / "model_repository" / model / "1" / "model.py")
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_text().split("\0")
            if words[0].endswith("triton_python_backend_stub") and words[1] == script:
                found.append(int(path.parent.name))
    (pid,) = found
    return pid


async def _exactly_as_many_fit_as_should(ports: Ports, expected: Expected) -> None:
    jobs = [Job(i, "", PROMPTS[i], LONGEST_TEXT, more={"n": SLOTS}) for i in (1, 2)]
    assert sum(job.more["n"] for job in jobs) == SLOTS + MAX_QUEUE
    async with Client(ports.grpc) as client:
        rest, refusal = await fill(client, jobs, Job(0, "", "a", 1))
        assert "queue is full" in refusal
        answers = await rest
    for job in jobs:
        (part,) = answers[str(job.number)]
        assert part.token_ids == expected.tokens[job.prompt] * SLOTS


async def _answers_correctly(ports: Ports, expected: Expected) -> None:
    async with Client(ports.grpc, ports.http) as client:
        for road in load.ROADS:
            for number, prompt in enumerate(PROMPTS[:4]):
                job = Job(number, road, prompt, LONGEST_TEXT)
                expected.check(job, await asyncio.wait_for(ask_all(client, job), WAIT))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chaos")
    write_pair(directory)
    return directory


def test_chaos(pair: Path) -> None:
    built = build_pair(pair, "ensemble", slots=SLOTS, max_queue=MAX_QUEUE)
    expected = alone(pair, built, PROMPTS)

    async def run(served: Served) -> Chaos:
        chaos = Chaos(served, expected)
        await chaos.run()
        return chaos

    with serving(built) as served:
        chaos = asyncio.run(run(served))
        print(f"\nslowest {chaos.slowest:.1f} s;", dict(sorted(chaos.outcomes.items())))
        restarts = [line for _, line in served.said if "restarting" in line]
        assert len(restarts) == 1, served.said
        assert "draft" in restarts[0]
        goes_idle(served.ports)
        asyncio.run(_exactly_as_many_fit_as_should(served.ports, expected))
        asyncio.run(_answers_correctly(served.ports, expected))
        goes_idle(served.ports)
    malformed_ = sum(n for what, n in chaos.outcomes.items() if what.startswith("malformed"))
    assert malformed_ >= MALFORMED
