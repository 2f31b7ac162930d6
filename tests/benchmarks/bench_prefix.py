"""Time to first token of a chat's turns, with and without kept prefixes, in turns.

    python tests/benchmarks/bench_prefix.py BUILD [--chats 32 --mib 1024]

A chat of 10 turns over a system prompt of 2,000 tokens sends all of its text back each time.
Without `--chats` one chat is decoded both ways, turn by turn, and the texts must be the same. With
it, so many chats with one system prompt go on at once: what is reused within so many MiB.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from dflash_trt.chat import Render, load_chat_template
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import PrefixCache, Request, Scheduler, Sequence, block_bytes, in_process
from dflash_trt.decoding.speculation import profile_of, strategy
from dflash_trt.engines import load_engine

LICENSE = Path(__file__).parents[2] / "LICENSE"
SYSTEM_TOKENS, NEW_TOKENS, TURNS = 2000, 48, 10
QUESTIONS = (
    "What is this text about?",
    "Who may use the work?",
    "What must I do when I change a file?",
    "Does it grant patents?",
    "What ends the patent licence?",
    "May I sell copies?",
    "What is a Contribution?",
    "What does it say of trademarks?",
    "Is there a warranty?",
    "Sum it up in one sentence.",
)


class Chat:
    """One conversation, rendered as the server would."""

    def __init__(self, tokenizer: Tokenizer, template: Render, name: str = "") -> None:
        self._tokenizer, self._template = tokenizer, template
        licence = tokenizer.encode(LICENSE.read_text(), add_special_tokens=False).ids
        system = tokenizer.decode(licence[:SYSTEM_TOKENS])
        self._messages = [{"role": "system", "content": f"Answer by this text.\n{system}"}]
        self._name = name

    def ask(self, turn: int) -> list[int]:
        """The prompt of its next turn."""
        self._messages.append({"role": "user", "content": f"{self._name}{QUESTIONS[turn]}"})
        text = self._template(messages=self._messages, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def answered(self, tokens: list[int]) -> None:
        content = self._tokenizer.decode(tokens, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": content})


def first_token(
    scheduler: Scheduler, prompt: list[int], stop: frozenset[int]
) -> tuple[float, Sequence]:
    """Seconds until a request's first token; it runs to its end."""
    start = time.perf_counter()
    sequence, seconds = scheduler.submit(Request(prompt, NEW_TOKENS, stop_ids=stop)), 0.0
    while scheduler.busy:
        scheduler.step()
        if sequence.tokens and not seconds:
            seconds = time.perf_counter() - start
    return seconds, sequence


def one_chat(
    start: Callable[[PrefixCache | None], Scheduler], chat: Chat, stop: frozenset[int]
) -> None:
    """Both ways, which take turns; prints each turn and the ratio of turns 2 to 10."""
    schedulers, ratios, same = (start(None), start(PrefixCache(10**6))), list[float](), True
    first_token(schedulers[0], chat.ask(0), stop)  # shapes are bound
    chat._messages.pop()
    print("turn  prompt  cached  without ms  with ms  ratio")
    for turn in range(TURNS):
        prompt = chat.ask(turn)
        order = 1 - 2 * (turn % 2)
        found = [first_token(each, prompt, stop) for each in schedulers[::order]]
        (off, plain), (on, reused) = found[::order]
        same &= plain.tokens == reused.tokens
        if turn:
            ratios.append(on / off)
        print(
            f"{turn + 1:4}  {len(prompt):6}  {reused.cached_tokens:6}  {1e3 * off:10.0f}"
            f"  {1e3 * on:7.0f}  {on / off:5.3f}",
            flush=True,
        )
        chat.answered(reused.tokens)
    print(f"turns 2 to {TURNS}: median {median(ratios):.3f}, most {max(ratios):.3f}")
    print("same texts" if same else "the texts differ")


def many_chats(
    scheduler: Scheduler, cache: PrefixCache, chats: list[Chat], stop: frozenset[int], block: int
) -> None:
    """All at once, turn by turn; prints what was reused of the prompts' tokens."""
    for turn in range(TURNS):
        asked = [
            scheduler.submit(Request(chat.ask(turn), NEW_TOKENS, stop_ids=stop)) for chat in chats
        ]
        start = time.perf_counter()
        while scheduler.busy:
            scheduler.step()
        for chat, sequence in zip(chats, asked, strict=True):
            chat.answered(sequence.tokens)
        cached = sum(sequence.cached_tokens for sequence in asked)
        total = sum(len(sequence.request.prompt) for sequence in asked)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(
            f"turn {turn + 1:2}: {cached} of {total} prompt tokens reused, "
            f"{time.perf_counter() - start:.0f} s, {len(cache) * block / 2**20:.0f} MiB kept, "
            f"at most {peak:.0f} MiB resident",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--chats", type=int, default=0)
    parser.add_argument("--mib", type=int, default=1024)
    args = parser.parse_args()
    engines, tokenizer_dir = args.build / "engines", args.build / "tokenizer"
    target, drafter = (load_engine(engines / role) for role in ("target", "drafter"))
    rounds, block = in_process(target, drafter), block_bytes((target.info, drafter.info))
    costs = profile_of(engines, "in_process", rounds)
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    template = load_chat_template(tokenizer_dir)
    assert template is not None
    stop = frozenset({tokenizer.token_to_id("<|im_end|>")})

    def start(cache: PrefixCache | None) -> Scheduler:
        policy, proposer = strategy(Speculation(), target.info, costs)
        return Scheduler(
            rounds,
            slots=target.info.slots,
            max_seq_len=target.info.max_seq_len,
            prefill_chunk=256,
            policy=policy,
            proposer=proposer,
            prefix_cache=cache,
        )

    print(f"{block / 16 / 1024:.1f} KiB a token")
    if not args.chats:
        one_chat(start, Chat(tokenizer, template), stop)
    else:
        cache = PrefixCache(args.mib * 2**20 // block)
        chats = [Chat(tokenizer, template, f"({i}) ") for i in range(args.chats)]
        many_chats(start(cache), cache, chats, stop, block)


if __name__ == "__main__":
    main()
