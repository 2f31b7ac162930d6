"""Description of an engine, `engine.json`."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from dflash_trt.engine_kinds import GraphKind, graph_facts
from dflash_trt.errors import EngineError
from dflash_trt.files import EXACT, Size, read_as
from dflash_trt.machine import usable_cores

ENGINE_FILE = "engine.json"
MAX_BUFFERED = 256
"""From so many tokens of a sequence on the drafter has to take in buffered features: all in one
step, with those of the next round. See `most_buffered`."""
MOST_VERIFIED = 16  # tokens of a sequence in a round, unless blocks are longer
PROMPT_STEP = 64  # tokens: prompts are padded to a multiple, for engines that compile per size
Shape = tuple[int | str, ...]  # a string is a size chosen by each step


@dataclass(frozen=True, kw_only=True)
class PlanInfo:
    __pydantic_config__: ClassVar = EXACT

    library: str  # "tensorrt" or "tensorrt_rtx"
    version: str  # of the library, which loads only its own version's plans
    compute_capabilities: tuple[str, ...]  # of supported GPUs
    dtype: str  # "float16" or "bfloat16": weights, products and KV caches
    graph: str  # SHA-256 of the graph's file
    prefill_chunk: int  # most tokens of a sequence in one step
    profiles: tuple[dict[str, tuple[int, int, int]], ...]  # minimum, optimum, maximum
    inputs: dict[str, tuple[str, Shape]]  # dtype and shape
    outputs: dict[str, tuple[str, Shape]]
    aliases: dict[str, str]  # outputs written into an input's memory
    taken_apart: tuple[str, ...] = ()  # attention nodes without a kernel


@dataclass(frozen=True, kw_only=True)
class StateInfo:
    """What recurrent layers keep of a slot, all float32: shapes of `checkpoints.StateShapes`."""

    __pydantic_config__: ClassVar = EXACT

    layers: Size
    state: tuple[Size, Size, Size]
    inputs: tuple[Size, Size]
    drafts: tuple[Size, Size]
    window: Size  # inputs before the first new token that its convolution reads

    @property
    def caches(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the name of the cache, which its layer's number follows."""
        return {"state": self.state, "inputs": self.inputs, "drafts": self.drafts}

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, whatever the length of its text."""
        return self.layers * sum(4 * math.prod(shape) for shape in self.caches.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept for texts to come, which has no drafts."""
        _, channels = self.inputs
        return self.layers * 4 * (math.prod(self.state) + self.window * channels)


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """One model's engine; lengths are in tokens."""

    __pydantic_config__: ClassVar = EXACT

    kind: GraphKind
    role: str  # "target" or "drafter"
    slots: Size
    max_seq_len: Size
    cache_len: Size  # max_seq_len plus room for entries that are written but never seen
    threads: Size | None  # from the config; see `cpu_threads`
    vocab_size: Size  # of the logits
    best: int  # number of each scored token's largest logits that the graph returns
    pair_scores: bool  # whether candidates are scored by the one before
    block_size: Size  # the anchor and the tokens drafted at once; 1 without a drafter
    sample_from_anchor: bool  # the first draft is from the anchor's place, not the first mask's
    mask_token_id: int
    caches: tuple[tuple[Size, Size], ...]  # kv heads and head_dim per layer with attention
    feature_size: int  # taps * hidden_size; 0 without taps
    states: StateInfo | None = None  # of a hybrid
    quantized: bool = False  # linear layers, whose inputs are rounded to 8 bits
    plan: PlanInfo | None = None  # for kind tensorrt
    dtype: str = "float32"  # for kind pytorch: of weights, products and KV caches
    fp8: bool = False  # for kind pytorch: there are linear layers in e4m3

    @property
    def cpu_threads(self) -> int:
        return self.threads or usable_cores()

    @property
    def widest(self) -> int:
        """The most tokens of a sequence in one step."""
        if self.plan is not None:
            return self.plan.prefill_chunk
        longest = graph_facts(self.kind).longest_step
        return self.max_seq_len if longest is None else min(self.max_seq_len, longest)

    @property
    def records_steps(self) -> bool:
        """Whether a first run compiles, a second records a CUDA graph, and later ones replay it."""
        return graph_facts(self.kind).records_steps

    def padded_round(self, tokens: int) -> int:
        """Return for how many tokens of a sequence to make a round, `most_verified` at most.

        Where steps are recorded, sizes are few: the rest is padding, which nobody reads.
        """
        if not self.records_steps:
            return tokens
        return padded_size(tokens, self.most_verified)

    def padded_width(self, tokens: int, position: int) -> int:
        """Return the same for a prompt, too, from a position on.

        A prompt of a hybrid is not padded: tokens after known ones are drafts, of which a state
        keeps few.
        """
        if tokens <= self.most_verified or not self.records_steps:
            return self.padded_round(tokens)
        if self.states is not None:
            return tokens
        padded = min(-(-tokens // PROMPT_STEP) * PROMPT_STEP, self.widest)
        if position + padded > self.cache_len:
            return tokens
        return padded

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        has_16_bits = self.plan is not None or self.dtype != "float32"
        wide = 2 if has_16_bits else 4
        return 2 * wide * sum(heads * size for heads, size in self.caches)

    @property
    def most_verified(self) -> int:
        return most_verified(self.block_size)


def few_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, .. and `largest`."""
    sizes = []
    size = 1
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def padded_size(size: int, largest: int) -> int:
    """Return the least of `few_sizes` that is not below `size`; 0 stays 0."""
    if size == 0:
        return 0
    return next(few for few in few_sizes(largest) if few >= size)


def most_verified(block_size: int) -> int:
    """Return the most tokens of a sequence in a round: the anchor and drafts."""
    return max(block_size, MOST_VERIFIED)


def target_cache_len(max_seq_len: int, block_size: int) -> int:
    """Return a slot's KV entries: a round at the last position still writes all of its own."""
    return _aligned(max_seq_len + most_verified(block_size))


def drafter_cache_len(max_seq_len: int, block_size: int) -> int:
    """Return a slot's KV entries.

    Buffered features, those of a round and the block of masks come after the last position: a
    sequence is padded to its neighbors.
    """
    longest = most_buffered(block_size) + most_verified(block_size) + block_size
    return _aligned(max_seq_len + longest)


def most_buffered(block_size: int) -> int:
    """Return of how many tokens of a sequence features are ever buffered.

    The round that should take them in leaves them where no sequence has room for drafts. Then each
    ends with the next round. So two rounds come on top of `MAX_BUFFERED`.
    """
    return MAX_BUFFERED + 2 * most_verified(block_size)


def buffered_bytes(feature_size: int) -> int:
    """Return the bytes of a slot's buffered features, float32, of `MAX_BUFFERED` tokens."""
    return 4 * MAX_BUFFERED * feature_size


def logits_bytes(vocab_size: int, block_size: int) -> int:
    """Return the bytes of a slot's logits in the largest round, float32."""
    return 4 * vocab_size * most_verified(block_size)


def _aligned(entries: int) -> int:
    """Round up, so that each sequence's entries start at a multiple of 256 bytes (TensorRT)."""
    return -(-entries // 8) * 8


def write_info(directory: Path, info: EngineInfo) -> None:
    (directory / ENGINE_FILE).write_text(json.dumps(asdict(info), indent=2) + "\n")


def read_info(directory: Path) -> EngineInfo:
    """Read `engine.json`; EngineError if missing or damaged."""
    path = directory / ENGINE_FILE
    try:
        return read_as(path, EngineInfo)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path} is not an engine description ({error})", "Run `dflash-trt build` again."
        ) from error
