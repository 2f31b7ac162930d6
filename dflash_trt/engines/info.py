"""`engine.json`: what whoever steps an engine must know of it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from dflash_trt.errors import EngineError
from dflash_trt.files import EXACT, Size, read_as
from dflash_trt.machine import usable_cores

ENGINE_FILE = "engine.json"
COSTS_FILE = "costs.json"  # beside both engines, no part of a build: `cost_profile.py`
HELD = 256
"""Tokens whose features `verify` keeps at most while no drafts are wanted, of one sequence: the
drafter takes them all in one step, with those of the next round."""
MOST_VERIFIED = 16  # tokens of a sequence in a round, unless blocks are longer
Shape = tuple[int | str, ...]  # a name is a size that each step chooses


@dataclass(frozen=True, kw_only=True)
class PlanInfo:
    """What TensorRT made of a graph."""

    __pydantic_config__: ClassVar = EXACT

    library: str  # "tensorrt" or "tensorrt_rtx"
    version: str  # of the library: it loads no plan of another version
    compute_capabilities: tuple[str, ...]  # of the GPUs that it runs on
    dtype: str  # "float16" or "bfloat16": weights, products and KV caches
    graph: str  # SHA-256 of the graph's file
    prefill_chunk: int  # the most tokens of a sequence in one step
    profiles: tuple[dict[str, tuple[int, int, int]], ...]  # least, usual, most of each named size
    inputs: dict[str, tuple[str, Shape]]  # dtype and shape
    outputs: dict[str, tuple[str, Shape]]
    aliases: dict[str, str]  # outputs that are written into the memory of an input
    taken_apart: tuple[str, ...] = ()  # attention nodes for which there is no kernel


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """One model's engine; lengths are in tokens."""

    __pydantic_config__: ClassVar = EXACT

    kind: str
    role: str  # "target" or "drafter"
    slots: Size
    max_seq_len: Size
    cache_len: Size  # max_seq_len plus room for rows that are written but never seen
    threads: Size | None  # as the config says; see `cpu_threads`
    vocab_size: Size  # of the logits
    best: int  # how many of each row's largest logits the graph picks out
    pair_scores: bool  # whether it scores each of those by the one taken a place before
    block_size: Size  # tokens that the drafter fills at once, and the anchor; 1 without a drafter
    sample_from_anchor: bool  # the first draft comes from the anchor's row, not the first mask's
    mask_token_id: int
    caches: tuple[tuple[Size, Size], ...]  # kv heads (of this rank) and head_dim of each layer
    feature_size: int  # taps * hidden_size, 0 where nothing is tapped
    window: int | None  # of the layer that sees the least; None: all see everything
    quantized: bool = False  # linear layers, whose inputs are rounded to 8 bits
    # checkpoint files that the graph points into (`weights: link`), by the link's name: see `stamp`
    originals: dict[str, dict[str, int]] = field(default_factory=dict)
    # of the GPUs' plans that compute together; others than 0 lie in the directory of 0
    rank: int = 0
    ranks: Size = 1
    plan: PlanInfo | None = None  # of kind tensorrt
    device: str = "cpu"  # of kind onnxruntime: "cpu" or "cuda"

    @property
    def cpu_threads(self) -> int:
        """Threads of an engine call: as was asked for, or the cores."""
        return self.threads or usable_cores()

    @property
    def widest(self) -> int:
        """The most tokens of a sequence in one step."""
        return self.plan.prefill_chunk if self.plan else self.max_seq_len

    @property
    def token_bytes(self) -> int:
        """Memory of a token's keys and values, over all ranks."""
        wide = 2 if self.plan else 4  # plans are in 16 bits, graphs in float32
        return 2 * wide * sum(heads * size for heads, size in self.caches) * self.ranks

    @property
    def most_verified(self) -> int:
        """The most tokens of a sequence in a round: the anchor and what was drafted."""
        return most_verified(self.block_size)

    @property
    def deepest(self) -> int:
        """How deep a tree of drafts may be, the anchor being at 0.

        Graphs measure windows in cache rows, and a tree's tokens lie further apart there than they
        are in the text: no matter while no window ends between two drafts.
        """
        return min(self.window or self.most_verified, self.most_verified - 1)


def most_verified(block_size: int) -> int:
    """See `EngineInfo.most_verified`."""
    return max(block_size, MOST_VERIFIED)


def rank_directory(directory: Path, rank: int) -> Path:
    """Return where the engine of a rank lies; `directory` is that of rank 0."""
    return directory / f"rank-{rank}" if rank else directory


def stamp(file: Path) -> dict[str, int]:
    """Size in bytes and time of the last change of a file that lies elsewhere."""
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def write_info(directory: Path, info: EngineInfo) -> None:
    """Write `engine.json` into an engine directory."""
    (directory / ENGINE_FILE).write_text(json.dumps(asdict(info), indent=2) + "\n")


def read_info(directory: Path, kind: str) -> EngineInfo:
    """Read `engine.json`; EngineError when it is missing, damaged or of another kind.

    And when a checkpoint that the engine points into is gone or has changed since.
    """
    path = directory / ENGINE_FILE
    try:
        info = read_as(path, EngineInfo)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path} is not an engine description ({error})", "Run `dflash-trt build` again."
        ) from error
    if info.kind != kind:
        raise EngineError(
            f"{path} describes a {info.kind!r} engine", f"This loader runs {kind!r} engines only."
        )
    for name, was in info.originals.items():
        link = directory / name
        if not link.exists() or stamp(link) != was:
            original = link.readlink() if link.is_symlink() else link
            raise EngineError(
                f"{original} {'has changed since' if link.exists() else 'is gone after'} the build "
                f"of {directory}, which reads its weights from there (weights: link)",
                "Put it back as it was, or run `dflash-trt build` again; with `weights: copy` a "
                "build stands alone",
            )
    return info
