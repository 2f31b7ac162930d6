"""The JSON files of a checkpoint directory."""

import json
from pathlib import Path
from typing import Any

from dflash_trt.errors import CheckpointError

MAX_JSON = 32 << 20  # bytes; the longest index of a published model has about 24 MB


def check_directory(directory: Path, role: str) -> None:
    """Raise CheckpointError unless `directory` is one; role: "target" or "drafter"."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"the {role} {directory} {what}",
            f"Set {role}.path in the build config to a Hugging Face model directory",
        )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, or CheckpointError."""
    try:
        if file.stat().st_size > MAX_JSON:
            raise ValueError(f"it has more than {MAX_JSON >> 20} MiB")
        value = parse_json(file.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror}",
            "Give the directory that save_pretrained wrote, config.json included",
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{file} is not valid JSON ({error})", "Download or export the checkpoint again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object", "Export the checkpoint again")
    return value


def parse_json(text: bytes, **options: Any) -> Any:
    """What `json.loads` gives of UTF-8 text; ValueError for everything wrong, deep nesting too."""
    try:
        return json.loads(text.decode("utf-8"), **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
