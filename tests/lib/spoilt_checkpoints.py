"""Safetensors files with an index and a quantization, one thing wrong in most of them."""

import json
import math
import random
import struct

from strategies import DICE, Files, Json, mutate, spoil_json, text_of

QUANTIZATIONS: tuple[Json, ...] = (
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
}
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def _weights(dice: random.Random) -> Files:
    """Shards, index and config of a checkpoint, with one thing wrong in most of them."""
    letters = dice.sample("nhqkuvo", k=dice.randrange(1, 8))
    header, at = dict[str, Json](), 0
    for name in (name for name in TENSORS if name[0] in letters):
        dtype, shape = TENSORS[name]
        end = at + BYTES[dtype] * math.prod(shape)
        header[name], at = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}, end
    data, places = dice.randbytes(at), {name: f"model-{dice.randrange(2)}.st" for name in header}
    config: Json = {"quantization_config": dice.choice(QUANTIZATIONS)}
    if dice.random() < 0.1:
        places["missing"] = "model-1.st"
    index = text_of({"metadata": {"total_size": at}, "weight_map": places})
    text, length = text_of(header), None
    match dice.choice(
        ["none", *["header"] * 3, "name", "empty", "length", "data", "index", "config"]
    ):
        case "header":
            text = spoil_json(text, dice)
        case "name":  # twice in one header
            entry = json.dumps(dice.choice([*header.values(), mutate(header, dice)]))
            name = json.dumps(dice.choice(sorted(header)))
            text = b"{" + name.encode() + b":" + entry.encode() + b"," + text[1:]
        case "empty":
            shape = [
                0,
                *dice.choices((1, 2**31, 2**40, 2**63 - 1, 2**64 - 1), k=dice.choice([1, 3, 70])),
            ]
            text = text_of(
                header | {"a": {"dtype": "U8", "shape": shape, "data_offsets": [at, at]}}
            )
        case "length":
            near = len(text) + dice.choice([-8, -1, 1, 8, at])
            length = dice.choice([near, 0, 1, 10**8, 10**12, 2**63, 2**64 - 1])
        case "data":
            data = dice.choice([data[:-1], data + b"\0", b"", data * 2])
        case "index":
            index = spoil_json(index, dice)
        case "config":
            config = mutate(config, dice)
    shard = struct.pack("<Q", len(text) if length is None else length) + text + data
    index = index.replace(b".st", b".safetensors")
    files = {f"model-{i}.safetensors": shard for i in range(2)}
    if not isinstance(config, dict):
        config = {"quantization_config": config}
    return {**files, "model.safetensors.index.json": index, "config.json": text_of(config)}


CHECKPOINTS = DICE.map(_weights)
