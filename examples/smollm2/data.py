"""The shards that `collect.py` wrote, as batches of blocks to draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rollout import TOP
from safetensors import safe_open
from torch import Tensor


@dataclass
class Batch:
    """Rows padded to the longest; a block is the anchor and the tokens after it."""

    ids: Tensor  # int64 [rows, length]
    features: Tensor  # bfloat16 [rows, length, taps * hidden]
    top_ids: Tensor  # int64 [rows, length, TOP]; position i predicts token i + 1
    top_probs: Tensor  # float32 [rows, length, TOP]
    anchors: Tensor  # int64 [rows, anchors]
    lengths: Tensor  # int64 [rows]


class Shards:
    """Every row of every shard; features stay on disk until a row is drawn."""

    def __init__(self, work: Path) -> None:
        self.files = sorted(work.glob("shard-*.safetensors"))
        self.handles = [safe_open(file, "pt") for file in self.files]
        self.ids, self.rows = [], []
        for shard, handle in enumerate(self.handles):
            self.ids.append(handle.get_tensor("ids").long())
            lengths, starts = handle.get_tensor("lengths"), handle.get_tensor("starts")
            ends = lengths.cumsum(0)
            for number, (length, start, end) in enumerate(
                zip(lengths.tolist(), starts.tolist(), ends.tolist(), strict=True)
            ):
                if length - start >= 2:
                    # a row's features begin `number` tokens earlier: each row has one less
                    self.rows.append((shard, end - length, end - length - number, length, start))

    def answers(self) -> Tensor:
        """Every token that the target wrote."""
        parts = [
            self.ids[shard][first + start : first + length]
            for shard, first, _, length, start in self.rows
        ]
        return torch.cat(parts)

    def batch(self, rows: list[int], anchors: int, generator: torch.Generator) -> Batch:
        chosen = [self.rows[row] for row in rows]
        longest = max(length for *_, length, _ in chosen)
        handle = self.handles[0]
        width = handle.get_slice("features").get_shape()[1]
        made = Batch(
            torch.zeros(len(rows), longest, dtype=torch.long),
            torch.zeros(len(rows), longest, width, dtype=torch.bfloat16),
            torch.zeros(len(rows), longest, TOP, dtype=torch.long),
            torch.zeros(len(rows), longest, TOP),
            torch.zeros(len(rows), anchors, dtype=torch.long),
            torch.tensor([length for *_, length, _ in chosen]),
        )
        for row, (shard, first, fed, length, start) in enumerate(chosen):
            handle, end = self.handles[shard], fed + length - 1
            made.ids[row, :length] = self.ids[shard][first : first + length]
            made.features[row, : length - 1] = handle.get_slice("features")[fed:end]
            made.top_ids[row, : length - 1] = handle.get_slice("top_ids")[fed:end].long()
            made.top_probs[row, : length - 1] = handle.get_slice("top_probs")[fed:end].float()
            draws = torch.rand(anchors, generator=generator)
            made.anchors[row] = (start + draws * (length - 1 - start)).long()
        return made

    def batches(self, size: int, anchors: int, generator: torch.Generator) -> Iterator[Batch]:
        """Every row once before any comes again; rows of about one length together."""
        while True:
            order = torch.randperm(len(self.rows), generator=generator)
            for pool in order.split(size * 8):
                by_length = sorted(pool.tolist(), key=lambda row: self.rows[row][3])
                groups = [by_length[i : i + size] for i in range(0, len(by_length), size)]
                for group in torch.randperm(len(groups), generator=generator).tolist():
                    yield self.batch(groups[group], anchors, generator)
