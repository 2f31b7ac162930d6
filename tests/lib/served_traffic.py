"""Requests over every road to `serve`, malformed ones between them, while another build of the same
pair takes its place: each text is what it is alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import load
import malformed_http
from live import serve_ports, serving
from load import Client, Job, ask_all
from tiny import alone, build_pair, make_jobs, make_prompts, write_pair

from dflash_trt.errors import DflashError
from dflash_trt.serving.server import call

JOBS, MALFORMED, CLIENTS, SLOTS, MAX_QUEUE, PROMPTS = 1000, 200, 32, 8, 128, 48
LONGEST = 10.0  # seconds to the answer to a malformed request


def run(seed: int, directory: Path) -> tuple[int, list[str], Counter[str]]:
    chance, prompts = random.Random(seed), make_prompts(PROMPTS)
    write_pair(directory)
    modes: list[Literal["ensemble", "in_process"]] = ["ensemble", "in_process"]
    built, other = (
        build_pair(directory, modes[(seed + i) % 2], slots=SLOTS, max_queue=MAX_QUEUE)
        for i in range(2)
    )
    expected = alone(directory, built, prompts)
    counts, wrong = Counter[str](), list[str]()
    jobs = iter(make_jobs(chance, prompts, JOBS))

    async def client(left: Iterator[Job]) -> None:
        async with Client(ports.grpc, ports.http) as client:
            for job in left:
                try:
                    expected.check(job, await asyncio.wait_for(ask_all(client, job), load.WAIT))
                    counts[job.road] += 1
                except Exception as error:
                    wrong.append(f"{job}: {error!r}")

    def malformed() -> None:
        for number in range(MALFORMED):
            request = malformed_http.request(seed, number)
            if request.door == malformed_http.TRITON:
                outcome = malformed_http.send(request, ports.http)
                counts[f"malformed: {outcome.status}"] += 1
                if fault := malformed_http.fault(request, outcome, LONGEST):
                    wrong.append(f"malformed {number}: {fault}")

    def swap() -> None:
        try:
            list(call(ports.http, {"build": str(other), "least": 0.0, "drain": load.WAIT}))
            counts["swapped"] += 1
            counts["answered before the swap"] = sum(counts[road] for road in load.ROADS)
        except DflashError as error:
            wrong.append(f"swap: {error}")

    async def all_at_once() -> None:
        clients = (client(jobs) for _ in range(CLIENTS))
        beside = (asyncio.to_thread(each) for each in (malformed, swap))
        await asyncio.gather(*beside, *clients)

    ports = serve_ports()
    with serving(built, ports):
        asyncio.run(all_at_once())
    return JOBS, wrong, counts
