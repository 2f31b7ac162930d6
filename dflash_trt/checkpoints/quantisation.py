"""How a checkpoint says that its weights are quantised."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from dflash_trt.checkpoints.files import read_json
from dflash_trt.checkpoints.stored import AGAIN
from dflash_trt.errors import CheckpointError

Size = Annotated[int, Field(ge=1)]
Block = tuple[Size, Size]  # rows and columns that have one scale

INSTEAD = "Use the model's bf16 checkpoint, or one in FP8, MXFP4 or NVFP4"
MODELOPT_FILE = "hf_quant_config.json"
MODELOPT = {"FP8", "NVFP4"}
COMPRESSED = {"float-quantized", "naive-quantized", "nvfp4-pack-quantized"}


class _Layer(BaseModel):
    quant_algo: str | None = None


class _Weights(BaseModel):
    block_structure: Block | None = None
    group_size: int | None = None  # -1: a whole row has one scale


class _Group(BaseModel):
    format: str | None = None
    weights: _Weights | None = None


class Quantisation(BaseModel):
    """The fields of `quantization_config` that say how weights are stored."""

    quant_method: str = ""
    # transformers' fp8
    fmt: str | None = None
    weight_block_size: Block | None = None
    # ModelOpt
    quant_algo: str | None = None
    quantized_layers: dict[str, _Layer] = {}
    # compressed-tensors
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    transform_config: dict[str, Any] | None = None


def announced_blocks(config: Mapping[str, Any], directory: Path) -> list[Block] | None:
    """The blocks of FP8 scales that config.json announces; None when nothing is quantised.

    config: config.json's `quantization_config`; ModelOpt also writes `hf_quant_config.json`.
    Raises CheckpointError for a method or layout that is not handled, naming it.
    """
    found = config.get("quantization_config")
    if not found and (directory / MODELOPT_FILE).is_file():
        found = read_json(directory / MODELOPT_FILE).get("quantization")
        found = {"quant_method": "modelopt", **found} if isinstance(found, dict) else found
    if not found:
        return None
    try:
        quant = Quantisation.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("quantization_config", *first["loc"])))
        raise CheckpointError(f"{directory}: {field}: {first['msg']}", AGAIN) from None
    if other := _not_handled(quant):
        raise CheckpointError(
            f"{directory} is quantised by {other}, which dflash-trt does not read", INSTEAD
        )
    weights = [group.weights for group in quant.config_groups.values() if group.weights]
    blocks = [quant.weight_block_size, *(each.block_structure for each in weights)]
    return [block for block in blocks if block] + [
        (1, each.group_size) for each in weights if each.group_size and each.group_size > 0
    ]


def _not_handled(quant: Quantisation) -> str | None:
    """The method, with what makes it another one than those that are read; None if it is read."""
    if quant.quant_method == "mxfp4":
        return None
    used: set[str | None]
    if quant.quant_method == "fp8":
        used, known = {quant.fmt or "e4m3"}, {"e4m3", "float8_e4m3fn"}
    elif quant.quant_method == "modelopt":
        used = {layer.quant_algo for layer in quant.quantized_layers.values()}
        used, known = (used or {quant.quant_algo}) - {None}, MODELOPT  # None: the cache alone
    elif quant.quant_method == "compressed-tensors":
        used = {group.format for group in quant.config_groups.values()} - {None}
        used, known = used or {quant.format}, COMPRESSED
        if (quant.transform_config or {}).get("config_groups"):
            used.add("transform_config")
    else:
        return quant.quant_method or "a method that it does not name"
    others = ", ".join(sorted(str(each) for each in used - known))
    return f"{quant.quant_method} ({others})" if others else None
