"""A tiny pair to serve, whose texts never end by themselves, and what it says when it is alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import reference
from load import ROADS, Expected, Job
from pairs import make_endless, make_pair, teach
from tokenizers import Tokenizer

from dflash_trt.build.run import build
from dflash_trt.config import BuildConfig
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import check_lossless

MAX_SEQ_LEN = 256
LONGEST_PROMPT, LONGEST_TEXT = 100, 60
LETTERS = "abcdefghij (){}:=\n\"'é🙂"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_pair(directory: Path) -> None:
    """`directory/target` and `directory/drafter`."""
    pair = make_pair(directory)
    teach(pair)
    make_endless(pair)
    (pair.target_dir / "chat_template.jinja").write_text(TEMPLATE)


def build_pair(
    directory: Path, mode: Literal["ensemble", "in_process"], *, slots: int, max_queue: int
) -> Path:
    """Builds the pair in `directory`."""
    config = BuildConfig(
        name="tiny",
        target={"path": directory / "target"},
        drafter={"path": directory / "drafter"},
        engine={"threads": 1},
        serving={
            "mode": mode,
            "slots": slots,
            "max_queue": max_queue,
            "max_seq_len": MAX_SEQ_LEN,
            "prefill_chunk": 32,
        },
    )
    build(config, directory / mode, lambda step, done, total: None)
    return directory / mode


def length(random_: random.Random, longest: int) -> int:
    """Many short ones, few long ones."""
    return min(longest, 1 + int(random_.expovariate(3 / longest)))


def make_prompts(count: int) -> list[str]:
    """Texts of 1 to 100 tokens: a token is a byte, of which a character may have four."""
    random_ = random.Random(0)
    texts = ["a", "def f(x):"]
    while len(texts) < count:
        text = "".join(random_.choices(LETTERS, k=length(random_, LONGEST_PROMPT)))
        if len(text.encode()) <= LONGEST_PROMPT and text not in texts:
            texts.append(text)
    return texts


def make_jobs(random_: random.Random, prompts: list[str], count: int) -> list[Job]:
    """Requests over each road in turn."""
    roads = [*ROADS]
    return [
        Job(i, roads[i % len(roads)], random_.choice(prompts), length(random_, LONGEST_TEXT))
        for i in range(count)
    ]


def alone(directory: Path, built: Path, prompts: list[str]) -> Expected:
    """From the engines in this process, a prompt at a time; the first ones from `transformers`."""
    tokenizer = Tokenizer.from_file(str(built / "tokenizer" / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    report = check_lossless(built / "engines", ids, LONGEST_TEXT, Speculation(), lambda done: None)
    assert report.identical == report.total
    texts = reference.greedy(directory / "target", ids[:6], LONGEST_TEXT)
    assert report.outputs[:6] == texts
    return Expected(dict(zip(prompts, report.outputs, strict=True)), tokenizer.decode)
