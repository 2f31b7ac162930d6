"""Load on a server: users who each wait for their answer, or random arrivals."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np

from dflash_trt.bench.protocols import Answer, Ask, Asking, open_client
from dflash_trt.bench.results import PERCENTILES, Level, kept
from dflash_trt.chat import as_chat
from dflash_trt.errors import BenchError

WARM_UP = 2  # requests before the first load


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The times, in seconds, within which an answer counts as good."""

    first_token: float
    inter_token: float  # mean of an answer


@dataclass(frozen=True, kw_only=True)
class Load:
    """A closed loop with `users`, or an open one with Poisson arrivals at `rate` per second."""

    users: int | None = None
    rate: float | None = None


async def measure_server(
    protocol: str,
    url: str,
    model: str | None,
    loads: Sequence[Load],
    asks: Sequence[Ask],
    count: int,
    goal: Goal,
    progress: Callable[[int, int], None],
    done: list[Level],
    turns: int = 1,
    system: str = "",
    warm_up: Sequence[Ask] = (),
) -> None:
    """Append a level for each load, of `count` requests; cancelled, `done` keeps what is whole.

    turns: so many of `asks` in a row are turns of one chat, which is sent back whole each time;
    system: what each chat begins with. warm_up: in place of the first two of `asks`.
    BenchError when the first request fails, so that a wrong URL does not run for minutes.
    """
    answered, total = 0, count * len(loads)
    connections = max(load.users or count for load in loads)
    async with open_client(protocol, url, model, connections) as asking:

        async def ask(which: Ask) -> Answer:
            nonlocal answered
            answer = await asking(which)
            answered += 1
            progress(answered, total)
            return answer

        first = [Chat([which]) for which in warm_up or islice(cycle(asks), WARM_UP)]
        for [answered_first] in await _closed(asking, first, connections if warm_up else 1):
            if (error := answered_first.error) is not None:
                raise BenchError(
                    f"{url} does not answer by {protocol}: {error}",
                    "Check that the server runs, and its port and protocol",
                )
        for load in loads:
            requests = list(islice(cycle(asks), count))
            chats = [Chat(requests[i : i + turns], system) for i in range(0, count, turns)]
            start = time.perf_counter()
            if load.rate is None:
                answered_chats = await _closed(ask, chats, load.users or 1)
            else:
                answered_chats = await _open(ask, chats, load.rate)
            done.append(summarise(load, answered_chats, start, goal))


@dataclass(frozen=True)
class Chat:
    """Requests that follow each other."""

    turns: Sequence[Ask]
    system: str = ""

    async def run(self, ask: Asking) -> list[Answer]:
        """One after the other, each with all that was said before; a failure ends it."""
        if len(self.turns) == 1 and not self.system:  # as it is, perhaps no chat at all
            return [await ask(self.turns[0])]
        said: list[Mapping[str, Any]] = []
        if self.system:
            said.append({"role": "system", "content": self.system})
        answers: list[Answer] = []
        for turn in self.turns:
            said += as_chat(turn.prompt) if isinstance(turn.prompt, str) else turn.prompt
            answers.append(await ask(replace(turn, prompt=[*said])))
            if answers[-1].error is not None:
                break
            said.append({"role": "assistant", "content": answers[-1].text})
        return answers


async def _closed(ask: Asking, chats: list[Chat], users: int) -> list[list[Answer]]:
    waiting, answers = iter(chats), []

    async def user() -> None:
        for chat in waiting:
            answers.append(await chat.run(ask))

    await asyncio.gather(*(user() for _ in range(users)))
    return answers


async def _open(ask: Asking, chats: list[Chat], rate: float) -> list[list[Answer]]:
    gaps = np.random.default_rng(chats[0].turns[0].seed).exponential(1 / rate, size=len(chats))
    start = time.perf_counter()

    async def arrive(chat: Chat, at: float) -> list[Answer]:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        return await chat.run(ask)

    times = (start + np.cumsum(gaps)).tolist()
    return await asyncio.gather(*map(arrive, chats, times))


def summarise(load: Load, chats: Sequence[Sequence[Answer]], start: float, goal: Goal) -> Level:
    """The level that these answers make; those with errors are counted, but not timed."""
    answers = [answer for chat in chats for answer in chat]
    later = [answer for chat in chats for answer in chat[1:] if answer.error is None]
    fine = [answer for answer in answers if answer.error is None and answer.came]
    first = [answer.came[0] - answer.sent for answer in fine]
    inter = [(answer.came[-1] - answer.came[0]) / max(answer.tokens - 1, 1) for answer in fine]
    whole = [answer.came[-1] - answer.sent for answer in fine]
    seconds = max([answer.came[-1] for answer in fine], default=start) - start
    good = sum(
        a <= goal.first_token and b <= goal.inter_token for a, b in zip(first, inter, strict=True)
    )
    rounds, cached = ([getattr(x, name) for x in fine] for name in ("rounds", "cached_tokens"))
    committed = [tokens for answer in fine for tokens in answer.round_tokens]
    errors = [answer.error or "no text came" for answer in answers if answer not in fine]
    return Level(
        users=load.users,
        rate=load.rate,
        requests=len(answers),
        errors=len(errors),
        first_error=errors[0] if errors else None,
        seconds=seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in fine),
        tokens=sum(answer.tokens for answer in fine),
        rounds=None if None in rounds else sum(each or 0 for each in rounds),
        first_token=_percentiles(first),
        inter_token=_percentiles(inter),
        whole=_percentiles(whole),
        per_user=median(a.tokens / t for a, t in zip(fine, whole, strict=True)) if fine else 0.0,
        good=good / seconds if seconds else 0.0,
        cached_tokens=None if None in cached else sum(cached),
        later_first_token=_percentiles([x.came[0] - x.sent for x in later if x.came]),
        kept=kept(committed),
    )


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(x) for x in np.percentile(values, PERCENTILES)] if values else []
