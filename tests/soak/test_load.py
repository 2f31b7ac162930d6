"""64 clients at once on the real server, over every road: each text is what it is alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import load
import pytest
from load import Client, Expected, Job, RefusedError, ask_all, fill, metric, resident
from tiny import LONGEST_TEXT, alone, build_pair, make_jobs, make_prompts, write_pair
from watched import goes_idle

from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.security import GATEWAY_KEY, Security
from dflash_trt.serving.server.process import Server
from dflash_trt.serving.server.run import prepare

pytestmark = pytest.mark.soak

CLIENTS, REQUESTS = 64, 2000
SLOTS, MAX_QUEUE = 16, 128
PROMPTS = 96
FLAT = 0.02  # growth of the resident memory over the last quarter


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("load")
    write_pair(directory)
    return directory


@pytest.fixture(params=["ensemble", "in_process"], scope="module")
def built(pair: Path, request: pytest.FixtureRequest) -> Path:
    return build_pair(pair, request.param, slots=SLOTS, max_queue=MAX_QUEUE)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return make_prompts(PROMPTS)


@pytest.fixture(scope="module")
def expected(pair: Path, built: Path, prompts: list[str]) -> Expected:
    return alone(pair, built, prompts)


@pytest.fixture(scope="module")
def running(built: Path) -> Iterator[tuple[Server, Ports]]:
    """A server, and where its clients come in."""
    ports = free_ports()
    with ExitStack() as stack:
        server, gateway = prepare(stack, built, ports, Security())
        stack.enter_context(server)
        stack.callback(gateway.stop)
        gateway.start(server.log)
        server.wait_ready()
        gateway.tell("ready")
        yield server, ports


def test_many_clients(
    running: tuple[Server, Ports], prompts: list[str], expected: Expected
) -> None:
    """Every reply is the prompt's own text; afterwards all slots are free and memory is flat."""
    (server, ports), jobs = running, make_jobs(random.Random(1), prompts, REQUESTS)
    answered: dict[int, int] = {}  # by job: its client
    memory: list[int] = []
    pids = [server.process.pid, *server.stubs()]

    async def work(name: int, left: Iterator[Job]) -> None:
        async with Client(ports.grpc, ports.http) as client:
            for job in left:
                expected.check(job, await ask_all(client, job))
                assert job.number not in answered
                answered[job.number] = name

    async def watch() -> None:
        while True:
            memory.append(resident(pids))
            await asyncio.sleep(0.1)

    async def run() -> float:
        watching = asyncio.ensure_future(watch())
        left, start = iter(jobs), time.monotonic()
        await asyncio.gather(*(work(i, left) for i in range(CLIENTS)))
        watching.cancel()
        return time.monotonic() - start

    before = metric(ports.metrics, "dflash_requests_total")
    seconds = asyncio.run(run())
    assert len(answered) == REQUESTS
    assert len(set(answered.values())) == CLIENTS
    goes_idle(server.ports)
    after = metric(ports.metrics, "dflash_requests_total")
    ended = {reason: int(after[reason] - before[reason]) for reason in after}
    assert ended.pop('finished_reason="length"') == REQUESTS
    assert not any(ended.values())

    quarter = memory[-len(memory) // 4 :]
    growth = median(quarter[-5:]) / median(quarter[:5]) - 1
    tokens = sum(job.max_tokens for job in jobs)
    curve = [memory[len(memory) * i // 8] >> 20 for i in range(8)] + [memory[-1] >> 20]
    print(
        f"\n{REQUESTS} requests, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} "
        f"tokens/s; MB {curve}, growth of the last quarter {growth:.2%}"
    )
    assert growth < FLAT


REFUSALS = {  # over a stream an error has no code; Triton's generate has 400 for all
    "grpc infer": "UNAVAILABLE",
    "http infer": "503",
    "http stream": "400",
    "http generate": "400",
}


@pytest.mark.parametrize("road", load.ROADS)
def test_a_full_queue_refuses_at_once(
    running: tuple[Server, Ports], prompts: list[str], expected: Expected, road: str
) -> None:
    """After all that came before, exactly as many fit as should."""
    server, ports = running
    asked = [64] * ((SLOTS + MAX_QUEUE) // 64)
    asked.append(SLOTS + MAX_QUEUE - sum(asked))
    jobs = [
        Job(i, "", prompts[i], LONGEST_TEXT, more={"n": n}) for i, n in enumerate(asked, start=1)
    ]

    async def run() -> tuple[list[float], list[int]]:
        seconds = []
        # Triton's own HTTP: through the gateway comes another client, for whom others give way
        inside = server.ports.http
        async with Client(ports.grpc) as client, Client(ports.grpc, inside) as other:
            other.http.headers[GATEWAY_KEY] = server.security.own_key
            rest, refusal = await fill(client, jobs, Job(0, "", "a", 1))
            assert "queue is full" in refusal
            for number in range(20):
                start = time.monotonic()
                with pytest.raises(RefusedError, match="queue is full") as caught:
                    await ask_all(other, Job(number, road, "a", 1))
                seconds.append(time.monotonic() - start)
                assert caught.value.code == REFUSALS.get(road, load.NO_STATUS)
            answers = await rest
        for job in jobs:
            (part,) = answers[str(job.number)]
            assert part.finish_reason == ["length"] * job.more["n"]
            assert part.token_ids == expected.tokens[job.prompt] * job.more["n"]
        return seconds, [len(answers[str(job.number)]) for job in jobs]

    seconds, _ = asyncio.run(run())
    print(f"\nrefused after {median(seconds) * 1e3:.1f} ms, at most {max(seconds) * 1e3:.1f} ms")
    assert max(seconds) < 1.0
    goes_idle(server.ports)


def test_clients_may_choose_the_same_id(running: tuple[Server, Ports], expected: Expected) -> None:
    """One that goes away does not end the other's request."""
    job = Job(7, "grpc infer", "a", LONGEST_TEXT)

    async def run() -> None:
        async with Client(running[1].grpc) as client, Client(running[1].grpc) as other:
            going = asyncio.ensure_future(ask_all(other, job))
            staying = asyncio.ensure_future(ask_all(client, job))
            await asyncio.sleep(0.02)
            going.cancel()
            expected.check(job, await staying)
            await asyncio.wait([going])

    for _ in range(5):
        asyncio.run(run())
