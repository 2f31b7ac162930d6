"""Compare `dflash-trt batch` with clients of the package openai, in turns over the same prompts.

    python scripts/batch_speed.py [BUILD] [--requests 1000] [--clients 64] [--turns 3]

Serves the build on free ports of this machine, and prints the seconds of each turn and the medians.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import openai

from dflash_trt.serving.batch import run_batch
from dflash_trt.serving.supervisor.run import running_server

PROMPTS = Path(__file__).parents[1] / "examples" / "pycode" / "prompts.jsonl"
MAX_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", nargs="?", type=Path, default=Path("build/pycode"))
    for name, default in (("requests", 1000), ("clients", 64), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    prompts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()]
    bodies = [
        {
            "model": "dflash",
            "prompt": prompts[number % len(prompts)],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        for number in range(given.requests)
    ]
    seconds: dict[str, list[float]] = {"batch": [], "clients": []}
    with running_server(given.build) as ports, tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{ports.http}"
        asyncio.run(ask(url, bodies[:100], given.clients))  # the prefix cache is warm for both
        for turn in range(given.turns):
            seconds["batch"].append(time_batch(url, bodies, Path(folder) / str(turn)))
            seconds["clients"].append(asyncio.run(ask(url, bodies, given.clients)))
    for name, times in seconds.items():
        print(f"{name}: {', '.join(f'{each:.1f}' for each in times)} s, median {median(times):.1f}")
    ratios = [a / b for a, b in zip(seconds["clients"], seconds["batch"], strict=True)]
    print(f"clients / batch: median {median(ratios):.2f}")


def time_batch(url: str, bodies: list[dict[str, Any]], path: Path) -> float:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    begun = time.monotonic()
    done = run_batch(path, path.with_suffix(".out"), url, None, None, lambda *_: None)
    assert done.answered == len(bodies), done
    return time.monotonic() - begun


async def ask(url: str, bodies: list[dict[str, Any]], clients: int) -> float:
    """Answer the requests by so many clients, each with its own connection."""
    left = iter(bodies)

    async def client() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=5) as api:
            for body in left:
                await api.completions.create(**body)

    begun = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.monotonic() - begun


main()
