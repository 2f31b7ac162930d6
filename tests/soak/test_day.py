"""A day of traffic in `DFLASH_TRT_DAY` seconds (an hour: 3600) against `dflash-trt serve`.

The traffic is that of published traces, at an eighth of their lengths. A report by the hour of the
day is written to `build/day.md`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles
from typing import Any

import openai
import prove
import pytest
from chat_pair import build_chat_pair
from live import serving
from load import metric
from processes import family, files_and_threads, name_of, prefixes_of, private, shared_memory
from pycode import PYCODE, prompt_ids
from tokenizers import Tokenizer

from dflash_trt.config.build import Serving
from dflash_trt.errors import UnavailableError
from dflash_trt.machine import machine
from dflash_trt.serving.client import AsyncClient, Client
from dflash_trt.serving.ports import Ports, free_ports

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("DFLASH_TRT_DAY", "150"))
HOURS, WARM_UP = 24, 8  # of a day; the first ones, in which caches fill
RATE = 2.0  # arrivals in a second, on average
# Azure's trace of conversations of 2024, its five weekdays: requests of an hour of the day against
# the mean, read off the plot of invocations a minute in AzurePublicDataset's
# analysis/AzureLLMInferenceDataset2024.ipynb (commit b469a11)
CURVE = [
    *(0.88, 0.97, 0.96, 0.80, 0.80, 0.87, 1.00, 1.08, 1.11, 1.08, 0.98, 1.02),
    *(1.14, 1.27, 1.33, 1.26, 1.14, 1.09, 1.08, 1.02, 0.93, 0.78, 0.70, 0.72),
]
# Azure's traces of 2023, an hour each, computed from data/AzureLLMInferenceTrace_{conv,code}.csv
# of the same commit: the quantiles 0.1, 0.25, 0.5, 0.75, 0.9 and 0.99 of the tokens of a request
# and of its answer, requests in the hour, and gaps' standard deviation over their mean
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
CONVERSATIONS = ((207, 396, 1020, 1189, 2735, 4142), (54, 85, 129, 395, 424, 601))  # 19,366; 1.1
CODE = ((147, 578, 1469, 2745, 5194, 7436), (7, 9, 13, 24, 55, 252))  # 8,819; 13.2
CODE_SHARE = 8819 / (8819 + 19366)
# gaps of which all but 1 in N are nothing deviate by sqrt(2 N - 1) means
BURST = (13.2**2 + 1) / 2
SCALE = 8  # the demo pair has room for 1,024 tokens
MOST = 900  # tokens of a request
TURNS = 2.0  # of a chat, on average; our choice, the traces do not tell
CHATS = 40  # each hour has the same ones, as often as it takes
SAMPLED = 0.2  # of the chats; the others are greedy
REFUSALS = ("queue is full", "it is full")  # over gRPC, over OpenAI's API
WAIT = 120.0
TOKENIZER = PYCODE / "target" / "tokenizer.json"
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Chat:
    """What its user says in each turn, and how long an answer to that may be."""

    said: list[str]
    lengths: list[int]
    options: dict[str, Any]


@dataclass
class Hour:
    firsts: list[float] = field(default_factory=list)  # seconds to the first token of an answer
    gaps: list[float] = field(default_factory=list)  # seconds a token after it
    ended: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, tuple[int, int, int]]] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)  # bytes
    tau: float = 0.0


def length(dice: random.Random, table: tuple[int, ...]) -> int:
    """Of a table of quantiles, straight lines between them."""
    at, values = min(dice.random(), QUANTILES[-1]), (1, *table)
    i = next(i for i in range(len(table)) if at <= QUANTILES[i + 1])
    share = (at - QUANTILES[i]) / (QUANTILES[i + 1] - QUANTILES[i])
    return max(1, round((values[i] + share * (values[i + 1] - values[i])) / SCALE))


def make_chats(dice: random.Random, code: bool) -> list[Chat]:
    """They say pieces of the demo pair's prompts."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokens = [token for ids in prompt_ids() for token in ids]
    asked, answered = CODE if code else CONVERSATIONS
    chats = []
    for number in range(CHATS):
        turns = 1
        while not code and dice.random() > 1 / TURNS:
            turns += 1
        lengths = [length(dice, answered) for _ in range(turns)]
        sizes = [length(dice, asked), *(20 for _ in lengths[1:])]
        while sum(sizes) + sum(lengths) > MOST and turns > 1:
            sizes, lengths, turns = sizes[:-1], lengths[:-1], turns - 1
        starts = [dice.randrange(len(tokens) - size) for size in sizes]
        pieces = [tokens[at:][:size] for at, size in zip(starts, sizes, strict=True)]
        said = [tokenizer.decode(piece) for piece in pieces]
        sampled = {"temperature": 0.8, "seed": number} if dice.random() < SAMPLED else {}
        chats.append(Chat(said, lengths, {"temperature": 0.0} | sampled))
    return chats


def plainly(ports: Ports, chat: Chat) -> list[str]:
    """What plain decoding answers to each turn."""
    answers, messages = list[str](), Messages()
    with Client(f"127.0.0.1:{ports.grpc}") as client:
        for said, tokens in zip(chat.said, chat.lengths, strict=True):
            messages.append({"role": "user", "content": said})
            answer = client.generate(messages, max_tokens=tokens, drafting=False, **chat.options)
            answers.append(answer.text)
            messages.append({"role": "assistant", "content": answer.text})
    return answers


class Day:
    """Arrivals, and what becomes of each."""

    def __init__(self, pid: int, ports: Ports, openai_port: int, seconds: float) -> None:
        self.pid, self.ports, self.hour_seconds = pid, ports, seconds / HOURS
        self.dice = random.Random(0)
        kinds = {code: make_chats(self.dice, code) for code in (False, True)}
        self.answers = {id(c): plainly(ports, c) for chats in kinds.values() for c in chats}
        self.next = {code: self._again_and_again(chats) for code, chats in kinds.items()}
        self.hours = [Hour() for _ in range(HOURS)]
        self.wrong = list[str]()
        self.url = f"http://127.0.0.1:{openai_port}/v1"

    def _again_and_again(self, chats: list[Chat]) -> Iterator[Chat]:
        while True:
            yield from self.dice.sample(chats, len(chats))

    async def run(self) -> None:
        async with (
            AsyncClient(f"127.0.0.1:{self.ports.grpc}") as self.grpc,
            openai.AsyncOpenAI(
                base_url=self.url, api_key="none", max_retries=0, timeout=WAIT
            ) as self.openai,
        ):
            self.begun = time.monotonic()
            watching = asyncio.ensure_future(asyncio.to_thread(self.watch))
            await asyncio.gather(self.arrive(False), self.arrive(True), watching)

    def now(self) -> int:
        """The hour of the day."""
        return int((time.monotonic() - self.begun) / self.hour_seconds)

    async def arrive(self, code: bool) -> None:
        """Conversations come one by one, code in bursts; of a chat only the first turn does."""
        rate = RATE * (CODE_SHARE if code else (1 - CODE_SHARE) / TURNS)
        at, running = self.begun, set[asyncio.Task[None]]()
        while (hour := int((at - self.begun) / self.hour_seconds)) < HOURS:
            await asyncio.sleep(at - time.monotonic())
            many = 1 + int(self.dice.expovariate(1 / BURST)) if code else 1
            for _ in range(many):
                task = asyncio.ensure_future(self.talk(next(self.next[code])))
                running.add(task)
                task.add_done_callback(running.discard)
            at += self.dice.expovariate(rate * CURVE[hour]) * (BURST if code else 1)
        await asyncio.gather(*running)

    async def talk(self, chat: Chat) -> None:
        messages, road = Messages(), self.dice.choice((self.over_grpc, self.over_openai))
        turns = zip(chat.said, chat.lengths, self.answers[id(chat)], strict=True)
        for said, tokens, expected in turns:
            messages.append({"role": "user", "content": said})
            hour = self.hours[min(self.now(), HOURS - 1)]
            try:
                text = await asyncio.wait_for(self.ask(road, messages, tokens, chat, hour), WAIT)
            except (UnavailableError, openai.APIStatusError) as error:
                stated = any(words in str(error) for words in REFUSALS)
                hour.ended["refused" if stated else f"failed: {error}"] += 1
                return
            except Exception as error:
                hour.ended[f"failed: {error!r}"] += 1
                return
            hour.ended["right" if text == expected else "wrong"] += 1
            messages.append({"role": "assistant", "content": expected})

    async def ask(self, road: Any, messages: Messages, tokens: int, chat: Chat, hour: Hour) -> str:
        start = last = time.monotonic()
        text, begun = "", False
        async for piece, count in road(messages, tokens, chat.options):
            now = time.monotonic()
            if begun and count:
                hour.gaps += [(now - last) / count] * count
            elif count:
                hour.firsts.append(now - start)
            begun, last, text = begun or count > 0, now if count else last, text + piece
        return text

    async def over_grpc(
        self, messages: Messages, tokens: int, options: dict[str, Any]
    ) -> AsyncIterator[tuple[str, int]]:
        async for chunk in self.grpc.stream(messages, max_tokens=tokens, **options):
            yield chunk.text, len(chunk.token_ids)

    async def over_openai(
        self, messages: Messages, tokens: int, options: dict[str, Any]
    ) -> AsyncIterator[tuple[str, int]]:
        """Its events do not say how many tokens they have; latency is of those that have text."""
        create: Any = self.openai.chat.completions.create  # whose messages have a type each
        stream = await create(
            model="pycode", messages=messages, max_tokens=tokens, stream=True, **options
        )
        async for part in stream:
            text = part.choices[0].delta.content if part.choices else None
            yield text or "", bool(text)

    def watch(self) -> None:
        """What the processes hold, once a second, and what each round committed by the hour."""
        pids, counters = family(self.pid), self.counters()
        names = prefixes_of(pids)
        for number, hour in enumerate(self.hours):
            end = self.begun + (number + 1) * self.hour_seconds
            while (left := end - time.monotonic()) > 0:
                usage = {name_of(pid): (private(pid), *files_and_threads(pid)) for pid in pids}
                hour.samples.append(usage)
                hour.shared.append(shared_memory(names))
                time.sleep(max(0.0, min(1.0, left)))
            tokens, rounds = self.counters()
            hour.tau = (tokens - counters[0]) / max(1.0, rounds - counters[1])
            counters = tokens, rounds
        assert pids == family(self.pid), "a process was replaced"

    def counters(self) -> tuple[float, float]:
        totals = [
            sum(metric(self.ports.metrics, f"dflash_acceptance_length_{name}").values())
            for name in ("sum", "count")
        ]
        return totals[0], totals[1]

    def held(self, name: str, what: int) -> list[float]:
        """Of a process, by the hour: bytes, files or threads."""
        return [median(each[name][what] for each in hour.samples) for hour in self.hours]

    def report(self) -> str:
        here = machine()
        text = [
            f"Commit {prove.commit()}, {here['cores']} cores {here['cpu']}, a day in "
            f"{self.hour_seconds * HOURS:.0f} s",
            "",
            "| hour | right | refused | first token ms (p99) | next token ms (p99) | tau | "
            "memory MB | shared MB | files | threads |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for number, hour in enumerate(self.hours):
            latency = [milliseconds(each) for each in (hour.firsts, hour.gaps)]
            sums = [sum(self.held(n, what)[number] for n in hour.samples[0]) for what in range(3)]
            text.append(
                f"| {number} | {hour.ended['right']} | {hour.ended['refused']} | {latency[0]} | "
                f"{latency[1]} | {hour.tau:.2f} | {sums[0] / 1e6:.0f} | "
                f"{median(hour.shared) / 1e6:.1f} | {sums[1]:.0f} | {sums[2]:.0f} |"
            )
        return "\n".join(text) + "\n"


def milliseconds(times: list[float]) -> str:
    """Their median and their 99th percentile."""
    if len(times) < 2:
        return "-"
    return f"{1000 * median(times):.0f} ({1000 * quantiles(times, n=100)[-1]:.0f})"


def growth(values: list[float]) -> float:
    """Over the hours after the first ones: the median slope between two of them (Theil-Sen), which
    one hour with a burst does not turn."""
    hours = list(enumerate(values[WARM_UP:]))
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(hours, 2)]
    return median(slopes) * len(hours)


def by_chance(values: list[float]) -> float:
    """The deviation of a growth, by what the hours deviate from it."""
    slope = growth(values) / len(values[WARM_UP:])
    rest = [value - slope * hour for hour, value in enumerate(values[WARM_UP:])]
    return pstdev(rest) * (12 / len(rest)) ** 0.5


def test_a_day(tmp_path: Path) -> None:
    serving_ = Serving(slots=8, prefix_cache=64)  # MiB, which the traffic fills
    built, ports, port = (
        build_chat_pair(tmp_path, serving=serving_),
        free_ports(),
        free_ports().http,
    )
    with serving(built, ports) as (process, _):
        day = Day(process.pid, ports, port, SECONDS)
        asyncio.run(day.run())
        text = day.report()
    print(text)
    prove.REPORT.parents[1].mkdir(exist_ok=True)
    (prove.REPORT.parents[1] / "day.md").write_text(text)
    ended = sum((hour.ended for hour in day.hours), Counter[str]())
    assert ended.keys() <= {"right", "refused"}, ended
    assert ended["right"] > 0.9 * ended.total()
    for name in day.hours[0].samples[0]:
        memory, files, threads = (day.held(name, what) for what in range(3))
        assert growth(memory) < 0.05 * fmean(memory) + 4e6, (name, memory)
        assert growth(files) < 0.1 * fmean(files) + 4, (name, files)
        assert growth(threads) < 0.1 * fmean(threads) + 2, (name, threads)
    shared = [float(median(hour.shared)) for hour in day.hours]
    assert growth(shared) < 0.05 * fmean(shared), shared
    taus = [hour.tau for hour in day.hours]
    assert abs(growth(taus)) < max(4 * by_chance(taus), 0.02 * fmean(taus)), taus
