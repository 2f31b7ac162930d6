"""Engine directories made from graphs: `model.onnx`, its weights beside it, `engine.json`.

Separate from what runs them: a process that steps an engine never loads the graph builder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoints import DeltaNet, Drafter, DrafterSpec, Target
from dflash_trt.config import COPIED, Storage
from dflash_trt.engine_kinds import GraphKind, graph_facts
from dflash_trt.engines import (
    EngineInfo,
    StateInfo,
    drafter_cache_len,
    most_verified,
    target_cache_len,
    write_info,
)
from dflash_trt.files import Entry
from dflash_trt.graphs import (
    GraphBuilder,
    candidates_per_draft,
    drafter_graph,
    target_graph,
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    slots: int
    max_seq_len: int
    threads: int | None = None
    storage: Storage = COPIED
    kind: GraphKind = "onnxruntime"
    dtype: str = "float32"
    progress: Callable[[str], None] = lambda _: None  # called with each tensor's name


def build_target(
    target: Target, drafter: DrafterSpec | None, directory: Path, options: EngineOptions
) -> dict[Path, Entry]:
    """Write the engine, with the drafter's taps; return manifest entries of large files."""
    block_size = drafter.block_size if drafter else 1
    cache_len = target_cache_len(options.max_seq_len, block_size)
    taps = drafter.target_layer_ids if drafter else ()
    graph = target_graph(
        target,
        taps,
        cache_len,
        options.kind,
        storage=options.storage,
        most_drafts=most_verified(block_size) - 1,
    )
    return _build("target", target, drafter, cache_len, graph, directory, options)


def build_drafter(
    drafter: Drafter, target: Target, directory: Path, options: EngineOptions
) -> dict[Path, Entry]:
    """Write the drafter's engine, including what it shares with the target; see `build_target`."""
    spec = drafter.spec
    cache_len = drafter_cache_len(options.max_seq_len, spec.block_size)
    graph = drafter_graph(drafter, target, cache_len, storage=options.storage)
    return _build("drafter", drafter, spec, cache_len, graph, directory, options)


def _states(nets: Sequence[DeltaNet], most_drafts: int) -> StateInfo | None:
    if not nets:
        return None
    shapes = nets[0].state_shapes(most_drafts)
    return StateInfo(layers=len(nets), window=nets[0].kernel_size - 1, **shapes._asdict())


def _build(
    role: str,
    model: Target | Drafter,
    drafter: DrafterSpec | None,
    cache_len: int,
    graph: GraphBuilder,
    directory: Path,
    options: EngineOptions,
) -> dict[Path, Entry]:
    spec = model.spec
    block_size = drafter.block_size if drafter else 1
    info = EngineInfo(
        kind="onnxruntime" if graph_facts(options.kind).compiler else options.kind,
        role=role,
        slots=options.slots,
        max_seq_len=options.max_seq_len,
        cache_len=cache_len,
        threads=options.threads,
        vocab_size=spec.num_logits,
        best=candidates_per_draft(drafter) if drafter and role == "drafter" else 1,
        pair_scores=bool(drafter and role == "drafter" and drafter.selector),
        block_size=block_size,
        sample_from_anchor=bool(drafter and drafter.sample_from_anchor),
        mask_token_id=drafter.mask_token_id if drafter else 0,
        caches=tuple(
            (layer.num_key_value_heads, layer.head_dim) for layer in spec.attention_layers
        ),
        states=_states(spec.delta_nets, most_verified(block_size) - 1),
        feature_size=len(drafter.target_layer_ids) * drafter.hidden_size if drafter else 0,
        quantized=graph.quantized,
        dtype=options.dtype,
        fp8=graph.has_fp8,
    )
    directory.mkdir(parents=True, exist_ok=True)
    written = graph.save(directory, options.progress)
    write_info(directory, info)
    return written
