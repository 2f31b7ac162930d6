"""Blocks of a drafter in training: what each sees, and how much its places count."""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = 4.0  # how slowly the weight of later draft tokens decays


def block_mask(anchors: Tensor, length: int, block: int) -> Tensor:
    """Return the mask `[rows, 1, queries, length + queries]`, true where a block's token attends.

    It sees the context before its anchor (the anchor's own features do not exist yet when the
    block is drafted) and its own block in both directions; no other block.
    """
    rows, count = anchors.shape
    owner = torch.arange(count, device=anchors.device).repeat_interleave(block)
    before = torch.arange(length, device=anchors.device) < anchors[:, owner, None]
    own = (owner[:, None] == owner).expand(rows, -1, -1)
    return torch.cat([before, own], dim=-1)[:, None]


def position_weights(label_probs: Tensor, aware: float) -> Tensor:
    """Return weights of draft positions `[blocks, block - 1]`; a block's sum to one on average.

    A share `aware` follows the gradient of the expected number of rounds, the mean of 1 / tau
    with tau = 1 + sum over k of p_1 ... p_k: position j counts with every product it is part of,
    and blocks that are hopeless or easy already count less. The rest decays with j.
    """
    decay = torch.exp(-torch.arange(label_probs.shape[1], device=label_probs.device) / GAMMA)
    products = label_probs.cumprod(-1)
    reach = products.flip(-1).cumsum(-1).flip(-1)
    gain = reach / (1 + products.sum(-1, keepdim=True)) ** 2
    return (1 - aware) * decay / decay.sum() + aware * gain / gain.sum(-1).mean()
