"""Train the drafter on the shards of `collect.py`, as long as wanted; a stopped run goes on.

The learning rate stays as it is, so that training can go on at any time. `--cool STEPS` lowers it
to nothing and writes the drafter, and leaves the state as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from collect import TAPS
from data import Shards
from dflash.model import DFlashDraftModel
from model import (
    Vocabulary,
    draft_config,
    draft_loss,
    load_weights,
    save_drafter,
    start_from_target,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM

PUBLISHED = Path(__file__).resolve().with_name("drafter")
LAYERS = 2
DRAFT_VOCABULARY = 8192
ROWS, ANCHORS = 16, 32
RATES = (0.015, 2e-3)  # of Muon and of AdamW
WARMUP, REPORT, SAVE = 40, 20, 50  # steps


def optimizers(drafter: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    others = [p for p in drafter.parameters() if p.ndim != 2]
    muon, adam = RATES
    return [
        torch.optim.Muon(matrices, lr=muon, weight_decay=0.0),
        torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def begin(shards: Shards, drafter: DFlashDraftModel, target: LlamaForCausalLM) -> None:
    """The drafter at step 0: the published one, otherwise one made of the target."""
    if PUBLISHED.exists():
        load_weights(drafter, PUBLISHED)
        return
    sample = shards.batch(list(range(0, len(shards.rows), 40)), 1, torch.Generator())
    features = sample.features[:, 1:].flatten(0, 1)  # the first token's are like no others
    start_from_target(drafter, target, features[features.abs().sum(-1) > 0])


def save(state: dict[str, Any], file: Path) -> None:
    torch.save(state, f"{file}.part")
    os.replace(f"{file}.part", file)


class Log:
    """A line of JSON every few steps, and the same on the screen."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.losses: list[float] = []
        self.rounds: list[float] = []

    def step(self, number: int, seconds: float, loss: Tensor, hits: Tensor) -> None:
        self.losses.append(loss.item())
        # rounds a token, if blocks like these followed each other
        self.rounds.append((1 / (1 + hits.cumprod(-1).sum(-1))).mean().item())
        if number % REPORT:
            return
        line = {
            "step": number,
            "minutes": round(seconds / 60, 1),
            "loss": round(sum(self.losses) / len(self.losses), 3),
            "block_tau": round(len(self.rounds) / sum(self.rounds), 3),
            "hits": [round(hit, 2) for hit in hits.mean(0).tolist()],
        }
        print(json.dumps(line), flush=True)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        self.losses, self.rounds = [], []


def train(options: argparse.Namespace) -> None:
    shards = Shards(options.work / "data")
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    target.requires_grad_(False)
    torch.manual_seed(0)
    drafter = DFlashDraftModel(draft_config(target.config, LAYERS, TAPS))
    used = optimizers(drafter)
    file = options.work / "training.pt"
    if file.exists():
        state: dict[str, Any] = torch.load(file, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        for optimizer, kept in zip(used, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
    else:
        state = {"step": 0, "seconds": 0.0}
        begin(shards, drafter, target)
    answers = shards.answers()
    # the commonest tokens of all shards there are: the head is the target's, so it may change
    counts = torch.bincount(answers, minlength=target.config.vocab_size)
    ids = counts.argsort(descending=True, stable=True)[:DRAFT_VOCABULARY].sort().values
    vocabulary = Vocabulary(ids, target)
    print(
        f"step {state['step']}: {len(shards.rows)} rows, {len(answers)} tokens of answers, "
        f"{(vocabulary.row[answers] >= 0).float().mean():.4f} of them in the draft vocabulary; "
        f"{sum(p.numel() for p in drafter.parameters()):,} parameters",
        flush=True,
    )
    drafter.train()
    embedding = target.model.embed_tokens.weight
    first, before, began = state["step"], state["seconds"], time.monotonic()
    batches = shards.batches(ROWS, ANCHORS, torch.Generator().manual_seed(1000 + first))
    log = Log(options.work / ("cool.jsonl" if options.cool else "log.jsonl"))
    step, seconds = first, before
    while step - first < (options.cool or options.steps):
        rate = 1 - (step - first) / options.cool if options.cool else min(1, (step + 1) / WARMUP)
        for optimizer, most in zip(used, RATES, strict=True):
            optimizer.param_groups[0]["lr"] = most * rate
        loss, hits = draft_loss(drafter, embedding, vocabulary, next(batches), options.aware)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in used:
            optimizer.step()
            optimizer.zero_grad()
        step, seconds = step + 1, before + time.monotonic() - began
        log.step(step, seconds, loss, hits)
        if not options.cool and (step % SAVE == 0 or step - first == options.steps):
            learned = {
                "drafter": drafter.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in used],
            }
            save(learned | {"step": step, "seconds": seconds}, file)
    if options.cool:
        save_drafter(drafter, vocabulary, options.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="where --cool writes the drafter")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cool", type=int, default=0)
    parser.add_argument("--aware", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments)
