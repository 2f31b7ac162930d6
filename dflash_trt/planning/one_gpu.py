"""What fits on one GPU of engine kind `pytorch`: weights, and slots of a fixed size."""

from dataclasses import dataclass, replace
from typing import ClassVar

from dflash_trt.planning.capacity import Deployment
from dflash_trt.planning.model_size import BF16, FP8, Format, Layer, ModelSize
from dflash_trt.planning.rounds import Layout, Software

NUMBER_BYTES = 2  # of a key or value
E4M3 = Format("fp8", 1, BF16.multiplied)  # its kernels widen what they read


@dataclass(frozen=True)
class OneGpu(Deployment):
    """A build whose slots each have room for the longest sequence."""

    software: ClassVar[Software] = "pytorch"

    max_seq_len: int = 0
    slot_bytes: int = 0
    prefix_cache: int = 0  # bytes

    def fit(self, layout: Layout, context: int, longest: int) -> int:
        """Return how many slots there is room for; 0 for a sequence that is too long for one."""
        if context > self.max_seq_len:
            return 0
        return max(int((self.free_bytes(layout) - self.prefix_cache) / self.slot_bytes), 0)


def as_stored(size: ModelSize, *, fp8: bool) -> ModelSize:
    """Return a model with the formats in which the engine has it.

    fp8: whether linear layers are stored in e4m3, which otherwise they are where the checkpoint has
    them so. Experts, and what else is quantized, are widened to 16 bits.
    """

    def format_of(before: Format) -> Format:
        return E4M3 if fp8 or before == FP8 else BF16

    def stored(layer: Layer) -> Layer:
        return replace(
            layer,
            attention_format=format_of(layer.attention_format),
            mlp_format=format_of(layer.mlp_format),
            expert_format=BF16,
        )

    return replace(size, layers=tuple(map(stored, size.layers)))


def token_bytes(model: ModelSize) -> int:
    """Return the bytes of a token's keys and values."""
    return NUMBER_BYTES * sum(layer.cached for layer in model.layers)
