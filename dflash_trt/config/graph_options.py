"""How graphs store weights and compute: what a config's engine section says to their builder."""

from dataclasses import dataclass
from typing import Literal

Bits = Literal[4, 8]


@dataclass(frozen=True)
class Storage:
    # of linear layers, in blocks of 32 (`graphs/quantized.py`); None: the checkpoint's own dtype
    bits: Bits | None = None
    # a GGUF file's blocks stay as they are, if they have no more bits than that
    keep_blocks: bool = False
    # layers of 8 bits multiply integers: less accurate, but 8 tokens take little longer than one
    int8_inputs: bool = False
    # of linear layers: e4m3, a scale for each output
    fp8: bool = False
    # of linear layers that the checkpoint has in e4m3: its codes and scales
    keep_fp8: bool = False


COPIED = Storage()


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    storage: Storage = COPIED  # the drafter's may have fewer bits
    threads: int | None = 1  # of the CPU; None: as many as the machine that serves has cores
    dtype: str = "float32"  # of weights, products and KV caches
