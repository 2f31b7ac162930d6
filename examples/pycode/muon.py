"""Muon for the weight matrices, AdamW for everything else, and one cosine schedule for both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration: pushes the singular values of `[n, rows, cols]` towards one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized. `torch.optim.Muon` iterates in bfloat16, slow on older CPUs."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # Matrices of one shape (either way round) share one batched iteration.
            same: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    update = self._momentum(param, group["momentum"])
                    wide = update if update.shape[0] <= update.shape[1] else update.T
                    same[tuple(wide.shape)].append((param, wide))
            for pairs in same.values():
                updates = orthogonalize(torch.stack([wide for _, wide in pairs]))
                for (param, _), update in zip(pairs, updates, strict=True):
                    rows, cols = param.shape
                    scale = math.sqrt(max(1.0, rows / cols))
                    step = update if update.shape == param.shape else update.T
                    param.add_(step, alpha=-group["lr"] * scale)

    def _momentum(self, param: Tensor, momentum: float) -> Tensor:
        buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
        assert param.grad is not None
        buffer.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(buffer, momentum)


class Optimizer:
    """Both optimizers behind one `step(loss)`: backward, clip, update, next learning rate."""

    def __init__(
        self, model: nn.Module, steps: int, muon_lr: float = 0.02, adam_lr: float = 3e-3
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.params = [p for _, p in named]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=muon_lr),
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        warmup = max(1, steps // 50)

        def rate(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2

        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in self.optimizers
        ]

    def step(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in self.schedules:
            schedule.step()
