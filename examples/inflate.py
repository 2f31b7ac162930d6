"""Make a trained pair as large as you like without changing what it says.

    python examples/inflate.py 0.6b build/inflated-0.6b [--pair examples/pycode]

The same text and the same acceptance, at the cost of a big model: so speed is measured with real
acceptance at real sizes, and nothing is downloaded or trained. Hidden size, head size, heads, MLP
and vocabulary grow by zeros, layers by ones that add nothing:

- RMSNorm over more channels, the new ones 0, comes out larger: its weights are scaled back.
- A head keeps its RoPE frequencies: of r times as many pairs, each r-th one is an old pair.
- New tokens must never win. All embeddings get a trace in one new channel, which no layer touches;
  the head weighs it against the new tokens.

For pairs in the Llama or Qwen3 layout with a z-lab drafter. Weights are float32; zeros take no disk
where the file system has holes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints import (
    DecoderSpec,
    Drafter,
    Shapes,
    Target,
    drafter_shapes,
    load_drafter,
    load_target,
    target_shapes,
    tokenizer_files,
)

Float32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
TRACE = 1e-2  # of the smallest embedding's root mean square
AGAINST = 1e7  # how much heavier a new token's head row weighs the trace than an old one's


@dataclass(frozen=True)
class Shape:
    """Sizes as config.json names them; those of Qwen3 where a shape is called after it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    drafter_layers: int


SHAPES = {
    "60m": Shape(512, 16, 8, 4, 64, 1536, 16384, 3),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936, 4),
    "8b": Shape(4096, 36, 32, 8, 128, 12288, 151936, 5),
}


@dataclass(frozen=True)
class Places:
    """Where the old indices of each axis lie among the new ones."""

    hidden: Ints
    query: Ints  # of q_proj's rows and o_proj's columns
    keys: Ints  # of k_proj's and v_proj's rows
    keys_from: Ints  # the old row of each of `keys`: a kv head may be needed twice
    head: Ints  # the channels of one head
    mlp: Ints


def places(spec: DecoderSpec, shape: Shape) -> Places:
    """ValueError where the shape has no room for the model."""
    layer, heads = spec.layers[0], spec.num_attention_heads
    if shape.head_dim % layer.head_dim:
        raise ValueError(f"head_dim {shape.head_dim} is no multiple of {layer.head_dim}")
    group = heads // layer.num_key_value_heads
    new_group = shape.num_attention_heads // shape.num_key_value_heads
    copies = -(-group // new_group)  # kv heads that one old kv head becomes
    least = {
        "hidden_size": spec.hidden_size + 1,  # for the trace
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": copies * layer.num_key_value_heads,
        "intermediate_size": layer.intermediate_size,
        "vocab_size": spec.vocab_size,
    }
    for name, size in least.items():
        if getattr(shape, name) < size:
            raise ValueError(f"{name} {getattr(shape, name)} is below {size}")
    half, step = layer.head_dim // 2, shape.head_dim // layer.head_dim
    pairs = np.arange(half) * step
    channels = np.concatenate([pairs, shape.head_dim // 2 + pairs])
    old = np.arange(heads)
    kv, within = old // group, old % group
    new_heads = (kv * copies + within // new_group) * new_group + within % new_group
    new_kv = np.arange(layer.num_key_value_heads * copies)

    def rows(of: Ints, size: int) -> Ints:
        return (of[:, None] * size + np.arange(size)).ravel()

    return Places(
        hidden=np.arange(spec.hidden_size),
        query=(new_heads[:, None] * shape.head_dim + channels).ravel(),
        keys=(new_kv[:, None] * shape.head_dim + channels).ravel(),
        keys_from=rows(new_kv // copies, layer.head_dim),
        head=channels,
        mlp=np.arange(layer.intermediate_size),
    )


def spread(values: Float32, shape: tuple[int, ...], *at: Ints) -> Float32:
    """Zeros of `shape` with `values` at the places `at` of each axis."""
    wide = np.zeros(shape, np.float32)
    wide[np.ix_(*at)] = values
    return wide


def inflate(name: str, old: Float32, spec: DecoderSpec, shape: Shape, at: Places) -> Float32:
    """One tensor of a layer, or one of the drafter's own or a final norm; [out, in] as stored."""
    hidden, part = shape.hidden_size, name.split(".")[-2]
    narrower = math.sqrt(spec.hidden_size / hidden)
    head_narrower = math.sqrt(spec.layers[0].head_dim / shape.head_dim)
    query = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    if part == "q_proj":
        # scores are divided by a larger sqrt(head_dim); with a norm on q, it makes up for that
        scale = 1.0 if spec.qk_norm else 1 / head_narrower
        return spread(old * np.float32(scale), (query, hidden), at.query, at.hidden)
    if part in ("k_proj", "v_proj"):
        return spread(old[at.keys_from], (keys, hidden), at.keys, at.hidden)
    if part == "o_proj":
        return spread(old, (hidden, query), at.hidden, at.query)
    if part == "q_norm":
        return spread(old, (shape.head_dim,), at.head)
    if part == "k_norm":
        return spread(old * np.float32(head_narrower), (shape.head_dim,), at.head)
    if part in ("gate_proj", "up_proj"):
        return spread(old, (shape.intermediate_size, hidden), at.mlp, at.hidden)
    if part == "down_proj":
        return spread(old, (hidden, shape.intermediate_size), at.hidden, at.mlp)
    if part == "fc":
        taps = old.shape[1] // spec.hidden_size
        columns = (np.arange(taps)[:, None] * hidden + at.hidden).ravel()
        return spread(old, (hidden, taps * hidden), at.hidden, columns)
    norm = spread(old * np.float32(narrower), (hidden,), at.hidden)
    if part == "norm":
        norm[spec.hidden_size] = 1.0  # the trace
    return norm


def table(old: Float32, shape: Shape, trace: float, new_tokens: float) -> Float32:
    """Embedding or head: `trace` in old tokens' first new channel, `new_tokens` in the others'."""
    wide = np.zeros((shape.vocab_size, shape.hidden_size), np.float32)
    wide[: len(old), : old.shape[1]] = old
    wide[: len(old), old.shape[1]] = trace
    wide[len(old) :, old.shape[1]] = new_tokens
    return wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path, help="gets target/ and drafter/")
    pycode = Path(__file__).parent / "pycode"
    parser.add_argument("--pair", type=Path, default=pycode, help="holds target/ and drafter/")
    options = parser.parse_args()
    inflate_pair(options.pair, SHAPES[options.shape], options.output)


def inflate_pair(pair: Path, shape: Shape, output: Path) -> None:
    """Write `output/target` and `output/drafter`, a few tensors in memory at a time."""
    target, drafter = load_target(pair / "target"), load_drafter(pair / "drafter")
    embedding = f"{target.spec.prefix}embed_tokens.weight"
    rows = target.weights.read(embedding).astype(np.float32)
    trace = TRACE * float(np.sqrt((rows**2).mean(1)).min())
    against = -AGAINST if target.spec.tie_word_embeddings else 0.0
    tables = {embedding: (trace, against), "lm_head.weight": (0.0, -AGAINST)}
    kept = spread_out(target.spec.num_hidden_layers, shape.num_hidden_layers)
    config = enlarged_config(target.directory, target.spec, shape)
    write_model(output / "target", config, target, target_shapes, shape, kept, tables)
    for file in (*tokenizer_files(target.directory), target.directory / "generation_config.json"):
        if file.is_file():
            shutil.copyfile(file, output / "target" / file.name)

    taps = [kept[tap] for tap in drafter.spec.target_layer_ids]
    own = replace(shape, num_hidden_layers=shape.drafter_layers)
    config = enlarged_config(drafter.directory, drafter.spec, own)
    config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": taps}
    config["num_target_layers"] = shape.num_hidden_layers
    kept = spread_out(drafter.spec.num_hidden_layers, own.num_hidden_layers)
    write_model(output / "drafter", config, drafter, drafter_shapes, own, kept, {})


def spread_out(old: int, new: int) -> list[int]:
    """Where each of `old` layers lies among `new` ones; the last one stays the last."""
    return [(i + 1) * new // old - 1 for i in range(old)]


def enlarged_config(directory: Path, spec: DecoderSpec, shape: Shape) -> dict[str, Any]:
    """config.json with the new sizes."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config |= {name: value for name, value in asdict(shape).items() if name in config}
    config["dtype"] = "float32"
    config["rms_norm_eps"] = spec.rms_norm_eps * spec.hidden_size / shape.hidden_size
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * shape.num_hidden_layers
    return config


def write_model(
    directory: Path,
    config: dict[str, Any],
    model: Target | Drafter,
    shapes: Callable[[Any], Shapes],
    shape: Shape,
    kept: Sequence[int],
    tables: Mapping[str, tuple[float, float]],
) -> None:
    """Write config.json and model.safetensors; kept: where the old layers lie, others are zeros."""
    spec, at = model.spec, places(model.spec, shape)
    layer = replace(
        spec.layers[0],
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
    )
    large = replace(
        spec,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        layers=(layer,) * shape.num_hidden_layers,
    )
    prefix = f"{spec.prefix}layers."
    old_name = {}
    for name in shapes(spec):
        index, _, rest = name.removeprefix(prefix).partition(".")
        inside = name.startswith(prefix)
        old_name[f"{prefix}{kept[int(index)]}.{rest}" if inside else name] = name

    def make(name: str) -> Float32 | None:
        if name not in old_name:
            return None
        values = model.weights.read(old_name[name]).astype(np.float32)
        if name in tables:
            return table(values, shape, *tables[name])
        return inflate(name, values, spec, shape, at)

    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    write_safetensors(directory / "model.safetensors", shapes(large), make)


def write_safetensors(path: Path, shapes: Shapes, make: Callable[[str], Float32 | None]) -> None:
    """Write float32 tensors one by one; `make` gives None for zeros, which stay a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            values = make(name)
            if values is None:
                file.seek(4 * math.prod(shape), os.SEEK_CUR)
            else:
                assert values.shape == shape, (name, values.shape, shape)
                file.write(values.astype("<f4", copy=False).data)
        file.truncate()


if __name__ == "__main__":
    main()
