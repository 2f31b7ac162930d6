"""Give a trained drafter DFlash 2's candidate selector: which token follows which, from the texts.

A score is near log P(token | the one before) - log P(token), low rank. Only the gate, how much of
it counts at each place of a block, looks at the drafter's hidden states.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from collect import CONVERSATIONS, TAPS
from data import Shards
from dflash.model import DFlashDraftModel
from model import BLOCK, block_states, draft_config, load_weights, save_selector
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaForCausalLM

RANK = 32
PAIRS, OTHERS = 3072, 768  # of a step; the other tokens that each pair is held against
RATES = (5e-3, 1.2e-2)  # of the maps and of each token's own part
SYSTEM = 30  # tokens that every conversation begins with
GATES = (0.15, 0.8)  # at the first place, whose anchor the drafter has seen, and at the others
ROWS, ANCHORS = 48, 16  # of which the gate is fitted
RIDGE = 1.0


def pairs() -> Tensor:
    """Neighbours in all texts, int64 `[2, pairs]`, the questions among them."""
    found = []
    with safe_open(CONVERSATIONS, "pt") as kept:
        for name in sorted({key.split(".")[0] for key in kept.keys()}):  # noqa: SIM118
            ids = kept.get_tensor(f"{name}.ids").long()
            lengths = kept.get_tensor(f"{name}.lengths").long()
            row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            place = torch.arange(len(ids)) - (lengths.cumsum(0) - lengths)[row]
            at = (place > SYSTEM).nonzero()[:, 0]
            found.append(torch.stack([ids[at - 1], ids[at]]))
    return torch.cat(found, dim=1)


def codebooks(table: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Codes of all tokens as predecessors and as successors, `[vocabulary, RANK]`.

    A code is a linear map of the token's embedding, which serves rare tokens, plus a part of its
    own. Each pair is held against tokens drawn as often as they occur, so that a score says how
    much likelier a token is after the other than anywhere.
    """
    generator = torch.Generator().manual_seed(0)
    table = table / table.std() / table.shape[1] ** 0.5
    (first, before), (second, after) = (torch.unique(side, return_inverse=True) for side in pairs())
    often = torch.bincount(after).float()
    maps = torch.randn(2, table.shape[1], RANK, generator=generator) * 0.3
    maps.requires_grad_()
    own = [torch.zeros(len(ids), RANK, requires_grad=True) for ids in (first, second)]
    optimizer = torch.optim.AdamW(
        [{"params": [maps]}, {"params": own}], betas=(0.9, 0.98), weight_decay=0.0
    )
    rows = table[first], table[second]

    def codes(side: int, chosen: Tensor) -> Tensor:
        return rows[side][chosen] @ maps[side] + own[side][chosen]

    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, RATES, strict=True):
            group["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps)
        at = torch.randint(len(before), (PAIRS,), generator=generator)
        others = torch.multinomial(often, OTHERS, replacement=True, generator=generator)
        context, token = codes(0, before[at]), after[at]
        right = (context * codes(1, token)).sum(-1)
        wrong = (context @ codes(1, others).T).masked_fill(others == token[:, None], -1e9)
        loss = (torch.logaddexp(wrong.logsumexp(-1), right) - right).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(json.dumps({"step": step + 1, "loss": round(loss.item(), 3)}), flush=True)
    with torch.no_grad():
        predecessors, successors = (table @ one for one in maps)
        predecessors[first] += own[0]
        successors[second] += own[1]
    return predecessors, successors


@torch.inference_mode()
def gate(drafter: DFlashDraftModel, embedding: Tensor, shards: Shards) -> Tensor:
    """The hidden projection `[RANK, hidden_size]`: the same number, GATES, in all components."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(len(shards.rows), generator=generator)[:ROWS].tolist()
    states = []
    for part in range(0, len(rows), 8):
        batch = shards.batch(rows[part : part + 8], ANCHORS, generator)
        states.append(block_states(drafter, embedding, batch)[0].float())
    hidden = torch.cat(states)
    first, later = GATES
    wanted = torch.tensor([first] + [later] * (BLOCK - 2)).repeat(len(hidden))
    hidden = hidden.flatten(0, 1)
    ridge = RIDGE * len(hidden) * torch.eye(hidden.shape[1])
    fitted = torch.linalg.solve(hidden.T @ hidden + ridge, hidden.T @ wanted)
    return fitted.expand(RANK, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="of train.py; written over")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    layers = json.loads((options.drafter / "config.json").read_text(encoding="utf-8"))
    layers = layers["transformer_layer_config"]["num_hidden_layers"]
    drafter = DFlashDraftModel(draft_config(target.config, layers, TAPS)).eval()
    load_weights(drafter, options.drafter)
    embedding = target.model.embed_tokens.weight.detach()
    projection = gate(drafter, embedding, Shards(options.work / "data"))
    save_selector(projection, *codebooks(embedding, options.steps), options.drafter)


if __name__ == "__main__":
    main()
