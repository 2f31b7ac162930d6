"""What `bench_serving` runs in processes of their own: a client with streams, or the bare engine.

    serving_load.py client GRPC_PORT STREAMS NEW_TOKENS < prompts.json
    serving_load.py bare DIRECTORY STREAMS NEW_TOKENS < prompts.json

Prints tokens per second: all tokens over the time from the first request to the last answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tokenizers import Tokenizer

from dflash_trt.build.manifest import read_manifest
from dflash_trt.decoding import Request, Scheduler, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.onnxruntime import Engine


def _inputs(prompt: str, new_tokens: int) -> list[triton.InferInput]:
    inputs = []
    for name, datatype, value in (
        ("text_input", "BYTES", np.array([prompt.encode()], object)),
        ("max_tokens", "INT32", np.array([new_tokens], np.int32)),
        ("ignore_eos", "BOOL", np.array([True])),
        ("stream", "BOOL", np.array([True])),
    ):
        made = triton.InferInput(name, [1], datatype)
        made.set_data_from_numpy(value)
        inputs.append(made)
    return inputs


async def _load(port: int, streams: int, new_tokens: int, prompts: list[str]) -> float:
    waiting = list(prompts)
    tokens = 0

    async def worker(client: triton.InferenceServerClient) -> None:
        nonlocal tokens
        ready = asyncio.Semaphore(1)  # one request at a time

        async def requests() -> AsyncIterator[dict[str, Any]]:
            while True:
                await ready.acquire()
                if not waiting:
                    return
                prompt = waiting.pop()
                yield {"model_name": "dflash", "inputs": _inputs(prompt, new_tokens)}

        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            tokens += len(result.as_numpy("token_ids"))
            if result.as_numpy("finish_reason")[0]:
                ready.release()

    async with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        start = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(streams)))
        seconds = time.perf_counter() - start
    assert tokens == new_tokens * len(prompts)
    return tokens / seconds


def _bare(directory: Path, streams: int, new_tokens: int, prompts: list[str]) -> float:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    manifest = read_manifest(directory)
    target = Engine(directory / "engines" / "target")
    drafter = Engine(directory / "engines" / "drafter")
    drafts = manifest["config"]["speculation"]["draft_tokens"]

    def decode(texts: list[str]) -> float:
        scheduler = Scheduler(
            in_process(target, drafter),
            slots=streams,
            max_seq_len=target.info.max_seq_len,
            prefill_chunk=manifest["config"]["serving"]["prefill_chunk"],
            policy=Fixed(drafts),
        )
        start = time.perf_counter()
        sequences = [scheduler.submit(Request(tokenizer.encode(t).ids, new_tokens)) for t in texts]
        while scheduler.busy:
            scheduler.step()
        return sum(len(s.tokens) for s in sequences) / (time.perf_counter() - start)

    decode(prompts[: 2 * streams])
    return decode(prompts)


if __name__ == "__main__":
    kind, where, count, length = sys.argv[1:]
    asked = json.load(sys.stdin)
    if kind == "client":
        print(asyncio.run(_load(int(where), int(count), int(length), asked)))
    else:
        print(_bare(Path(where), int(count), int(length), asked))
