"""Collect prompts that people wrote: `python people.py OUTPUT FILE...`.

FILE: GSM8K's `train.jsonl` (MIT), MBPP's `mbpp.jsonl` (CC BY 4.0; its train part), self-instruct's
`seed_tasks.jsonl` or a task of Natural Instructions, `tasks/*.json` (both Apache-2.0). OUTPUT gets
`prompts.jsonl` and `held_out.jsonl`, at most 32 prompts of each file, of which nothing is trained
on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 32  # prompts of a file
MBPP_TRAIN = range(601, 975)  # task_id
INSTANCES = 8  # of a task of Natural Instructions


def prompts_of(file: Path) -> list[str]:
    """Return the prompts in a file of one of the four sets; ValueError if it is of none."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return [*_natural(json.loads(text))]
    prompts = [_prompt(json.loads(line)) for line in text.splitlines()]
    return [prompt for prompt in prompts if prompt is not None]


def _prompt(record: dict[str, Any]) -> str | None:
    """Return a line's prompt; None: it is not of the train part."""
    if "question" in record:
        return str(record["question"])
    if "task_id" in record:
        if record["task_id"] not in MBPP_TRAIN:
            return None
        return "\n".join([record["text"], "", *record["test_list"]])
    if "instances" in record:
        given = record["instances"][0]["input"]
        return "\n\n".join(filter(None, [record["instruction"], given]))
    raise ValueError(f"a line with {', '.join(record)} is of no set that is known")


def _natural(task: dict[str, Any]) -> Iterator[str]:
    for instance in task["Instances"][:INSTANCES]:
        yield "\n\n".join([*task["Definition"], instance["input"]])


def read_questions(file: Path) -> list[str]:
    """Return the first messages of a file of chats."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def write_questions(questions: list[str], file: Path) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": each}]}) for each in questions]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    learned: list[str] = []
    held_out: list[str] = []
    for file in options.files:
        prompts = prompts_of(file)
        for number, prompt in enumerate(prompts):
            # evenly spread
            is_held_out = number * HELD_OUT % len(prompts) < HELD_OUT
            (held_out if is_held_out else learned).append(prompt)
    options.output.mkdir(parents=True, exist_ok=True)
    write_questions(learned, options.output / "prompts.jsonl")
    write_questions(held_out, options.output / "held_out.jsonl")
    print(f"{len(learned)} prompts to learn from, {len(held_out)} held out")


if __name__ == "__main__":
    main()
