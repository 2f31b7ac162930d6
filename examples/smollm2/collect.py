"""Collect what the drafter learns from: questions, the target's answers, and its tap features.

A shard is a file; its number is its seed, so a run that was stopped goes on with the next one.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import accumulate
from pathlib import Path

import torch
from prompts import chat, library_functions, sample_questions, solve
from rollout import Row, replay, roll_out
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

TAPS = [1, 8, 15, 22, 28]
ROWS = 192
ANSWER_TOKENS = 160
CODE = 0.35  # share of questions about code
LIBRARY = 0.15  # share of rows that are functions of the standard library
REPLAYED = 16  # rows at a time
CONVERSATIONS = Path(__file__).resolve().with_name("conversations.safetensors")
WARM = 0.2  # share of answers sampled at a temperature of 0.3 to 1, the others are greedy


def save(rows: list[Row], file: Path) -> int:
    """The rows of a shard one after another; `offsets` tells where each begins. Returns tokens."""
    lengths = torch.tensor([len(row.ids) for row in rows])
    fed = [row for row in rows if row.features is not None]
    tensors = {
        "ids": torch.cat([row.ids.int() for row in rows]),
        "lengths": lengths,
        "starts": torch.tensor([row.start for row in rows]),
        "features": torch.cat([row.features for row in fed]),  # type: ignore[misc]
        "top_ids": torch.cat([row.top_ids for row in fed]),  # type: ignore[misc]
        "top_probs": torch.cat([row.top_probs for row in fed]),  # type: ignore[misc]
    }
    save_file(tensors, f"{file}.part")
    os.replace(f"{file}.part", file)
    return int(lengths.sum())


def pack(work: Path) -> None:
    """Add the texts of all shards to CONVERSATIONS, of which `collect` makes them again."""
    tensors = load_file(CONVERSATIONS) if CONVERSATIONS.exists() else {}
    for file in sorted(work.glob("shard-*.safetensors")):
        with safe_open(file, "pt") as shard:
            tensors[f"{file.stem}.ids"] = shard.get_tensor("ids").to(torch.uint16)
            for name in ("lengths", "starts"):
                tensors[f"{file.stem}.{name}"] = shard.get_tensor(name).to(torch.uint16)
    save_file(tensors, CONVERSATIONS)


def replayed(model: LlamaForCausalLM, name: str) -> list[Row]:
    """The rows of a shard that CONVERSATIONS has; none if it has not."""
    if not CONVERSATIONS.exists():
        return []
    with safe_open(CONVERSATIONS, "pt") as kept:
        if f"{name}.ids" not in kept.keys():  # noqa: SIM118
            return []
        ids, lengths, starts = (
            kept.get_tensor(f"{name}.{part}").tolist() for part in ("ids", "lengths", "starts")
        )
    ends = list(accumulate(lengths))
    texts = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    rows: dict[int, Row] = {}
    by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # less padding
    for part in range(0, len(texts), REPLAYED):
        chosen = by_length[part : part + REPLAYED]
        made = replay(model, [texts[i] for i in chosen], [starts[i] for i in chosen], TAPS)
        rows.update(zip(chosen, made, strict=True))
    return [rows[number] for number in range(len(texts))]


def sampled(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, functions: list[str], number: int
) -> list[Row]:
    """New questions, and what the target answers."""
    generator = torch.Generator().manual_seed(number)
    questions = sample_questions(model, tokenizer, int(ROWS * 1.05), CODE, generator)
    order = torch.randperm(len(functions), generator=generator)
    wanted = max(int(ROWS * LIBRARY), ROWS - len(questions))
    questions = questions[: ROWS - wanted]
    questions += [solve(functions[i]) if i % 2 else functions[i] for i in order[:wanted]]
    ids = sorted((chat(tokenizer, question) for question in questions), key=len)
    draws = torch.rand(len(ids), 2, generator=generator)
    temperatures = torch.where(draws[:, 0] < WARM, 0.3 + 0.7 * draws[:, 1], 0.0)
    end = tokenizer.eos_token_id
    return roll_out(model, ids, ANSWER_TOKENS, temperatures, end, TAPS, generator)


def collect(target: Path, work: Path, numbers: range) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    functions = library_functions()
    work.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        file = work / f"shard-{number:04}.safetensors"
        if file.exists():
            continue
        began = time.monotonic()
        rows = replayed(model, file.stem) or sampled(model, tokenizer, functions, number)
        tokens = save(rows, file)
        written = sum(len(row.ids) - row.start for row in rows)
        spent = time.monotonic() - began
        print(
            f"{file.name}: {len(rows)} rows, {tokens} tokens, {written} of them answers, "
            f"{spent:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first shard")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pack", action="store_true", help="keep the texts in the repository")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    numbers = range(arguments.first, arguments.first + arguments.shards)
    collect(arguments.target, arguments.work, numbers)
    if arguments.pack:
        pack(arguments.work)
