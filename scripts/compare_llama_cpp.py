"""Compare a build, as it serves, with llama.cpp on the same GGUF file, in turns.

    python scripts/compare_llama_cpp.py BUILD MODEL.gguf CHATS.jsonl [--count 24] [--max-tokens 96]

CHATS has a JSON object with `messages` in each line. Needs llama-cpp-python. One greedy stream at a
time; rates are tokens/s after the first token, medians over the chats. llama.cpp drafts by its own
default, lookup in the text.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from dflash_trt.machine import cpu_model, usable_cores
from dflash_trt.serving.client import Client
from dflash_trt.serving.server import running_server

Messages = list[dict[str, Any]]
Speed = tuple[float, float]  # seconds to the first token, tokens/s after it
Way = Callable[[Messages, int], Speed]


def timed(pieces: Iterator[int]) -> Speed:
    """Time a stream; pieces: numbers of tokens that came together."""
    start = time.perf_counter()
    first, count = 0.0, 0
    for tokens in pieces:
        if tokens and not first:
            first = time.perf_counter()
            tokens -= 1
        count += tokens
    return first - start, count / (time.perf_counter() - first)


def served(client: Client, *, drafting: bool) -> Way:
    def run(messages: Messages, max_tokens: int) -> Speed:
        salt = str(time.time_ns())  # no prefix of an earlier turn is reused
        options = {"max_tokens": max_tokens, "drafting": drafting, "cache_salt": salt}
        return timed(len(x.token_ids) for x in client.stream(messages, temperature=0, **options))

    return run


def llama_cpp(model: Path, threads: int, *, drafting: bool) -> Way:
    draft_model = LlamaPromptLookupDecoding(num_pred_tokens=2) if drafting else None
    options = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": 2048, "verbose": False}
    llama = Llama(str(model), draft_model=draft_model, **options)

    def run(messages: Messages, max_tokens: int) -> Speed:
        llama.reset()
        chunks: Any = llama.create_chat_completion(
            messages, max_tokens=max_tokens, temperature=0, repeat_penalty=1, stream=True
        )
        return timed(1 for x in chunks if x["choices"][0]["delta"].get("content"))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    chats = [json.loads(line)["messages"] for line in args.chats.read_text().splitlines()]
    threads = usable_cores()
    with running_server(args.build) as ports, Client(f"127.0.0.1:{ports.grpc}") as client:
        ways = {
            "llama.cpp, plain": llama_cpp(args.model, threads, drafting=False),
            "llama.cpp, lookup": llama_cpp(args.model, threads, drafting=True),
            "dflash-trt, plain": served(client, drafting=False),
            "dflash-trt, drafts": served(client, drafting=True),
        }
        results: dict[str, list[Speed]] = {name: [] for name in ways}
        for run in ways.values():
            run(chats[0], args.max_tokens)
        for messages in chats[: args.count]:
            for name, run in ways.items():
                results[name].append(run(messages, args.max_tokens))
    print(f"{cpu_model()}, {threads} cores, {len(chats[: args.count])} chats")
    for name, values in results.items():
        first, rate = (median(column) for column in zip(*values, strict=True))
        print(f"{name:20} {rate:6.1f} tokens/s, first token after {1000 * first:.0f} ms")


if __name__ == "__main__":
    main()
