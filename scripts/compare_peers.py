"""Compare a build, as it serves, with llama.cpp and OpenVINO GenAI on the same GGUF file, in turns.

    python scripts/compare_peers.py BUILD MODEL.gguf CHATS.jsonl [--streams 8] [--rule "T 1"]...
        [--llama-server PROGRAM --drafter DRAFTER.gguf]

CHATS has a JSON object with `messages` in each line. Needs llama-cpp-python and openvino-genai.
With a drafter, llama.cpp's own server takes turns as well, plain and with its DFlash.
With one stream, rates are tokens/s after the first token; llama.cpp drafts by its own default,
lookup in the text. With several, they are tokens/s of all streams, prompts included, to the end of
the last text, past the end of texts. Rules of sampling take turns, too.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import llama_cpp
import openvino_genai
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from dflash_trt.bench import SamplingRule
from dflash_trt.machine import cpu_model, usable_cores
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.supervisor import running_server

Messages = list[dict[str, Any]]
Speed = tuple[float, float]  # seconds to the first token, tokens/s
RULES = {
    "greedy": SamplingRule(),
    "T 1": SamplingRule(1.0),
    "T 1, top_p 0.95": SamplingRule(1.0, top_p=0.95),
    "T 0.6, top_k 20, top_p 0.95": SamplingRule(0.6, top_p=0.95, top_k=20),
}
Way = Callable[[list[Messages], int, SamplingRule], Speed]


def timed(pieces: Iterator[int]) -> Speed:
    """Time a stream; pieces: numbers of tokens that came together.

    The rate of a text of one token is infinite.
    """
    start = first = time.perf_counter()
    count = 0
    for tokens in pieces:
        if not count:
            first = time.perf_counter()
        count += tokens
    taken = time.perf_counter() - first
    return first - start, (count - 1) / taken if count > 1 else float("inf")


def together(run: Callable[[], int]) -> Speed:
    """Time texts that are made at the same time; run: makes them and counts their tokens."""
    start = time.perf_counter()
    return float("nan"), run() / (time.perf_counter() - start)


def served(client: Client, drafting: bool) -> Way:
    def stream(
        messages: Messages, max_tokens: int, rule: SamplingRule, ignore_eos: bool
    ) -> Iterator[int]:
        options: dict[str, Any] = {"max_tokens": max_tokens, "drafting": drafting}
        options["cache_salt"] = str(time.time_ns())  # no prefix of an earlier turn is reused
        options["ignore_eos"] = ignore_eos
        for chunk in client.stream(messages, **asdict(rule), **options):
            yield len(chunk.token_ids)

    def run(chats: list[Messages], max_tokens: int, rule: SamplingRule) -> Speed:
        if len(chats) == 1:
            return timed(stream(chats[0], max_tokens, rule, ignore_eos=False))
        with ThreadPoolExecutor(len(chats)) as threads:
            count = partial(stream, max_tokens=max_tokens, rule=rule, ignore_eos=True)
            return together(lambda: sum(threads.map(lambda chat: sum(count(chat)), chats)))

    return run


def by_llama_cpp(model: Path, threads: int, drafting: bool) -> Way:
    draft_model = LlamaPromptLookupDecoding(num_pred_tokens=2) if drafting else None
    options = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": 2048, "verbose": False}
    llama = llama_cpp.Llama(str(model), draft_model=draft_model, **options)

    def run(chats: list[Messages], max_tokens: int, rule: SamplingRule) -> Speed:
        llama.reset()
        sampling = {**asdict(rule), "repeat_penalty": 1.0, "min_p": 0.0}
        chunks: Any = llama.create_chat_completion(
            chats[0], max_tokens=max_tokens, stream=True, **sampling
        )
        return timed(1 for x in chunks if x["choices"][0]["delta"].get("content"))

    return run


def by_llama_cpp_at_once(model: Path, threads: int, prompts: Callable[[Messages], str]) -> Way:
    """Return what decodes a sequence of each chat in one batch, as llama.cpp's server does."""
    llama = llama_cpp.Llama(str(model), verbose=False)

    def run(chats: list[Messages], max_tokens: int, rule: SamplingRule) -> Speed:
        prompt_ids = [
            llama.tokenize(prompts(chat).encode(), add_bos=False, special=True) for chat in chats
        ]
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_seq_max, parameters.n_ctx = len(chats), 2048 * len(chats)
        parameters.n_batch = parameters.n_ubatch = 2048
        parameters.n_threads = parameters.n_threads_batch = threads
        context = llama_cpp.llama_init_from_model(llama.model, parameters)
        batch = llama_cpp.llama_batch_init(2048, 0, 1)
        samplers = [_llama_sampler(rule, seed) for seed in range(len(chats))]

        def decode(tokens: list[tuple[int, int, int]], scored: list[int]) -> list[int]:
            """Decode (token, position, sequence); return the tokens after those scored."""
            batch.n_tokens = len(tokens)
            for i, (token, position, sequence) in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, i in scored
            assert llama_cpp.llama_decode(context, batch) == 0
            return [
                llama_cpp.llama_sampler_sample(samplers[tokens[i][2]], context, i) for i in scored
            ]

        def all_of_them() -> int:
            tokens = []
            for sequence, ids in enumerate(prompt_ids):
                part = [(token, position, sequence) for position, token in enumerate(ids)]
                tokens += decode(part, [len(ids) - 1])
            for step in range(max_tokens - 1):
                at = [
                    (t, len(ids) + step, s)
                    for s, (t, ids) in enumerate(zip(tokens, prompt_ids, strict=True))
                ]
                tokens = decode(at, list(range(len(at))))
            return max_tokens * len(chats)

        speed = together(all_of_them)
        for sampler in samplers:
            llama_cpp.llama_sampler_free(sampler)
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return speed

    return run


@contextmanager
def llama_server(command: list[str]) -> Iterator[str]:
    """Run llama.cpp's own server; yields its address."""
    port = free_ports().http
    with subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                if _answers(f"{url}/health"):
                    break
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def by_llama_server(url: str) -> Way:
    """Return what asks llama.cpp's server, one chat at a time or all at once; rates are its own."""

    def ask(messages: Messages, max_tokens: int, rule: SamplingRule, ignore_eos: bool) -> Any:
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": rule.temperature,
            "top_p": rule.top_p,
            "top_k": rule.top_k,
            "min_p": 0.0,
            "cache_prompt": False,
            "ignore_eos": ignore_eos,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        return answer.raise_for_status().json()["timings"]

    def run(chats: list[Messages], max_tokens: int, rule: SamplingRule) -> Speed:
        if len(chats) == 1:
            timings = ask(chats[0], max_tokens, rule, ignore_eos=False)
            return timings["prompt_ms"] / 1000, timings["predicted_per_second"]
        with ThreadPoolExecutor(len(chats)) as threads:
            count = partial(ask, max_tokens=max_tokens, rule=rule, ignore_eos=True)
            return together(
                lambda: sum(timings["predicted_n"] for timings in threads.map(count, chats))
            )

    return run


def llama_commands(args: argparse.Namespace, threads: int) -> dict[str, list[str]]:
    """Return how llama.cpp's server is started, plain and with its DFlash, by name."""
    if args.drafter is None:
        return {}
    context = str(2048 * args.streams)
    plain = [args.llama_server, "-m", str(args.model), "-np", str(args.streams), "-c", context]
    plain += ["-t", str(threads), "-tb", str(threads), "--jinja"]
    commands = {"llama-server": plain}
    for drafts in args.drafts:
        more = ["-md", str(args.drafter), "--spec-type", "draft-dflash"]
        commands[f"llama-server, DFlash {drafts}"] = [
            *plain, *more, "--spec-draft-n-max", str(drafts)
        ]  # fmt: skip
    return commands


def _llama_sampler(rule: SamplingRule, seed: int) -> Any:
    """Return a chain of llama.cpp's own samplers, in its usual order."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if not rule.temperature:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        return chain
    if rule.top_k:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(rule.top_k))
    if rule.top_p < 1:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_p(rule.top_p, 1))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(rule.temperature))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
    return chain


def by_openvino(pipeline: Any) -> Way:
    tokenizer = pipeline.get_tokenizer()

    def run(chats: list[Messages], max_tokens: int, rule: SamplingRule) -> Speed:
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, do_sample=False)
        if rule.temperature:
            config.do_sample = True
            config.temperature = rule.temperature
            config.top_p = rule.top_p
            config.top_k = rule.top_k or 2**31 - 1
        prompts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats
        ]
        if len(chats) > 1:
            config.ignore_eos = True

            def all_of_them() -> int:
                pipeline.generate(prompts, config)
                return max_tokens * len(chats)

            return together(all_of_them)
        metrics = pipeline.generate(prompts, config).perf_metrics
        first, per_token = metrics.get_ttft().mean / 1000, metrics.get_tpot().mean / 1000  # of ms
        return first, 1 / per_token

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rule", action="append", choices=RULES, help="default: greedy")
    parser.add_argument("--llama-server", default="llama-server", help="llama.cpp's program")
    parser.add_argument("--drafter", type=Path, help="GGUF drafter for it")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7], help="its draft tokens")
    args = parser.parse_args()
    lines = args.chats.read_text().splitlines()[: args.count]
    chats = [json.loads(line)["messages"] for line in lines]
    threads = usable_cores()
    pipeline = openvino_genai.LLMPipeline(str(args.model), "CPU", INFERENCE_NUM_THREADS=threads)
    prompt = partial(pipeline.get_tokenizer().apply_chat_template, add_generation_prompt=True)
    with ExitStack() as servers:
        ports = servers.enter_context(running_server(args.build))
        client = servers.enter_context(Client(f"127.0.0.1:{ports.grpc}"))
        ways = {"dflash-trt": served(client, False), "dflash-trt, drafts": served(client, True)}
        for name, command in llama_commands(args, threads).items():
            ways[name] = by_llama_server(servers.enter_context(llama_server(command)))
        ways["OpenVINO GenAI"] = by_openvino(pipeline)
        if args.streams == 1:
            ways["llama.cpp"] = by_llama_cpp(args.model, threads, drafting=False)
            ways["llama.cpp, lookup"] = by_llama_cpp(args.model, threads, drafting=True)
        else:
            ways["llama.cpp"] = by_llama_cpp_at_once(args.model, threads, prompt)
        turns = [*product(args.rule or ["greedy"], ways)]
        results: dict[tuple[str, str], list[Speed]] = {turn: [] for turn in turns}
        for rule, name in turns:
            ways[name](chats[: args.streams], args.max_tokens, RULES[rule])
        for i in range(0, len(chats) - args.streams + 1, args.streams):
            for rule, name in turns:
                speed = ways[name](chats[i : i + args.streams], args.max_tokens, RULES[rule])
                results[rule, name].append(speed)
    print(f"{cpu_model()}, {threads} cores, {len(chats)} chats, {args.streams} at a time")
    widest = max(len(name) for name in ways)
    for (rule, name), values in results.items():
        first, rate = (median(column) for column in zip(*values, strict=True))
        after = f", first token after {1000 * first:.0f} ms" if args.streams == 1 else ""
        print(f"{rule:28} {name:{widest}} {rate:6.1f} tokens/s{after}")


if __name__ == "__main__":
    main()
