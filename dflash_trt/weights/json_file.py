"""JSON files of a checkpoint."""

from pathlib import Path
from typing import Any

from dflash_trt import files
from dflash_trt.errors import CheckpointError


def read_bytes(file: Path, limit: int = files.MAX_JSON) -> bytes:
    """Read a file; CheckpointError if that fails. See `dflash_trt.files`."""
    try:
        return files.read_bytes(file, limit)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror}",
            "Give the directory that save_pretrained wrote, config.json included",
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; CheckpointError if it is invalid."""
    data = read_bytes(file)
    try:
        value = files.parse_json(data)
    except ValueError as error:
        raise CheckpointError(
            f"{file} is not valid JSON ({error})", "Download or export the checkpoint again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object", "Export the checkpoint again")
    return value
