"""Broken checkpoints by the thousand, opened and read under a memory limit.

`python tests/lib/fuzz_weights.py SEED CASES` prints what came of them as JSON; `unexpected` has
every exception that is not our own. In a process of its own, because the limit holds for a process.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
from mutations import spoil, text_of

LIMIT = 1 << 30  # bytes of address space
Json = Any
Files = dict[str, bytes]

JUNK: tuple[Json, ...] = (
    *mutations.JUNK,
    *("F32", "F64", "F4", "U8", "BOOL", "C64", "F8_E8M0", "F6_E2M3", {"dtype": "F32"}),
    *("model.safetensors", "model.safetensors.index.json", "folder", {"weight_map": {}}),
    *([0, 2**63], [2**32, 2**32], [0, 2**63 - 1], [1] * 70, [2**63, 0]),
    *({"quant_method": "fp8"}, {"quant_method": "mxfp4"}),
)
QUANTISATIONS: tuple[Json, ...] = (
    {"quant_method": "fp8", "weight_block_size": [2, 4]},
    {"quant_method": "fp8", "weight_block_size": None, "fmt": "e4m3"},
    {"quant_method": "mxfp4", "modules_to_not_convert": []},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "quantized_layers": {}},
    {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"format": "nvfp4-pack-quantized", "weights": {"group_size": 16}},
            "group_1": {"format": "float-quantized", "weights": {"block_structure": [2, 4]}},
        },
    },
)
TENSORS = {
    "norm.weight": ("BF16", [8]),
    "head.weight": ("F32", [2, 4]),
    "q.weight": ("F8_E4M3", [4, 8]),
    "q.weight_scale_inv": ("F32", [2, 2]),
    "k.weight": ("F8_E4M3", [4, 8]),
    "k.weight_scale": ("BF16", [4, 1]),
    "up_blocks": ("U8", [2, 4, 2, 16]),
    "up_scales": ("U8", [2, 4, 2]),
    "v.weight": ("U8", [4, 16]),
    "v.weight_scale": ("F8_E4M3", [4, 2]),
    "v.weight_scale_2": ("F32", []),
    "o.weight_packed": ("U8", [4, 16]),
    "o.weight_scale": ("F8_E4M3", [4, 2]),
    "o.weight_global_scale": ("F32", [1]),
    "q.input_scale": ("F32", []),
}
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def sound(chance: random.Random) -> tuple[Json, bytes]:
    """Header and data of a sound file with some of TENSORS, each with its scales."""
    letters = chance.sample("nhqkuvo", k=chance.randrange(1, 8))
    header, at = {}, 0
    for name in (name for name in TENSORS if name[0] in letters):
        dtype, shape = TENSORS[name]
        size = BYTES[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header, chance.randbytes(at)


def mutate(value: Json, chance: random.Random) -> Json:
    return mutations.mutate(value, chance, JUNK, [*mutations.NAMES, "__metadata__"])


def safetensors(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def mutated_header(chance: random.Random) -> Files:
    header, data = sound(chance)
    return {"model.safetensors": safetensors(text_of(mutate(header, chance)), data)}


def spoilt_header(chance: random.Random) -> Files:
    header, data = sound(chance)
    return {"model.safetensors": safetensors(spoil(text_of(header), chance), data)}


def repeated_name(chance: random.Random) -> Files:
    header, data = sound(chance)
    name = chance.choice(sorted(header))
    at = json.dumps(chance.choice([header[name], *header.values(), mutate(header[name], chance)]))
    text = b"{" + json.dumps(name).encode() + b":" + at.encode() + b"," + text_of(header)[1:]
    return {"model.safetensors": safetensors(text, data)}


def empty_tensor(chance: random.Random) -> Files:
    header, data = sound(chance)
    dtype, sizes = chance.choice(["F32", "U8", "F8_E4M3"]), (1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
    shape = [0, *chance.choices(sizes, k=chance.choice([1, 2, 3, 40, 70]))]
    chance.shuffle(shape)
    header["a"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data)]}
    return {"model.safetensors": safetensors(text_of(header), data)}


def wrong_length(chance: random.Random) -> Files:
    header, data = sound(chance)
    text = text_of(header)
    near = len(text) + chance.choice([-8, -1, 1, 8, len(data)])
    huge = chance.choice([0, 1, 10**8, 10**9, 10**12, 2**63, 2**64 - 1])
    return {"model.safetensors": safetensors(text, data, chance.choice([near, huge]))}


def wrong_file(chance: random.Random) -> Files:
    header, data = sound(chance)
    return {"model.safetensors": spoil(safetensors(text_of(header), data), chance)}


def wrong_data(chance: random.Random) -> Files:
    header, data = sound(chance)
    data = chance.choice([data[:-1], data + b"\0", b"", data * 2])
    return {"model.safetensors": safetensors(text_of(header), data)}


def wrong_index(chance: random.Random) -> Files:
    header, data = sound(chance)
    shards = {f"model-{i}.safetensors": safetensors(text_of(header), data) for i in range(2)}
    places = {name: chance.choice(sorted(shards)) for name in header}
    index: Json = {"metadata": {"total_size": len(data)}, "weight_map": places}
    if chance.random() < 0.1:
        places["missing"] = "model-1.safetensors"
    how = chance.random()
    text = text_of(mutate(index, chance) if how < 0.7 else index)
    return shards | {"model.safetensors.index.json": spoil(text, chance) if how > 0.6 else text}


def wrong_quantisation(chance: random.Random) -> Files:
    header, data = sound(chance)
    config = mutate({"quantization_config": chance.choice(QUANTISATIONS)}, chance)
    return {
        "model.safetensors": safetensors(text_of(header), data),
        "config.json": text_of(
            config if isinstance(config, dict) else {"quantization_config": config}
        ),
    }


MAKERS: tuple[Callable[[random.Random], Files], ...] = (
    *(mutated_header, mutated_header, spoilt_header, repeated_name, empty_tensor, wrong_length),
    *(wrong_file, wrong_data, wrong_index, wrong_quantisation),
)


def main(directory: Path, seed: int, cases: int) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    from dflash_trt.checkpoints import Weights, read_json  # noqa: PLC0415
    from dflash_trt.errors import CheckpointError  # noqa: PLC0415

    outcomes: dict[str, Counter[str]] = {}
    unexpected: list[str] = []
    (directory / "folder").mkdir()
    for case in range(cases):
        chance = random.Random(seed * 1_000_000 + case)
        maker = MAKERS[case % len(MAKERS)]
        files = maker(chance)
        for file, data in files.items():
            (directory / file).write_bytes(data)
        try:
            config = {"quantization_config": QUANTISATIONS[0]}
            if "config.json" in files:
                config = read_json(directory / "config.json")
            weights = Weights(directory, config)
            for name in weights.names:
                values = weights.read(name)
                assert values.shape == weights.shape(name)
                assert values.nbytes <= 8 * sum(map(len, files.values()))
            outcome = "read"
        except CheckpointError as error:
            str(error).encode("utf-8", "backslashreplace")
            outcome = "refused"
        except BaseException as error:
            outcome = "unexpected"
            unexpected.append(f"case {case}, {maker.__name__}: {error!r}"[:300])
        for file in files:
            (directory / file).unlink()
        outcomes.setdefault(maker.__name__, Counter())[outcome] += 1
    return {"outcomes": outcomes, "unexpected": unexpected}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(main(Path(name), int(sys.argv[1]), int(sys.argv[2]))))
