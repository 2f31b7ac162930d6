"""The JSON files of a checkpoint directory."""

import json
from pathlib import Path
from typing import Any

from dflash_trt.errors import CheckpointError


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
        value = json.loads(file.read_text(encoding="utf-8"))
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
