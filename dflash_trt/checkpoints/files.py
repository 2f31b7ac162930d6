"""The files of a checkpoint directory."""

from pathlib import Path
from typing import Any

from dflash_trt import files
from dflash_trt.errors import CheckpointError

POINTER = b"version https://git-lfs.github.com/spec/"  # how a Git LFS pointer begins


def check_directory(directory: Path, role: str) -> None:
    """Raise CheckpointError unless `directory` is one; role: "target" or "drafter"."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"the {role} {directory} {what}",
            f"Set {role}.path in the build config to a Hugging Face model directory",
        )


def read_bytes(file: Path, most: int = files.MAX_JSON) -> bytes:
    """CheckpointError when it cannot be read; see `dflash_trt.files`."""
    try:
        data = files.read_bytes(file, most)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror}",
            "Give the directory that save_pretrained wrote, config.json included",
        ) from error
    check_content(file, data)
    return data


def check_content(file: Path, data: bytes) -> None:
    """CheckpointError when a file that begins with `data` stands for one that was not fetched."""
    if data.startswith(POINTER):
        raise CheckpointError(
            f"{file} is a Git LFS pointer, not the file itself",
            f"Fetch the file: run `git lfs pull` in {file.parent}, or `hf download` the model",
        )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, or CheckpointError."""
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


def check_inside(directory: Path, file: Path) -> None:
    """CheckpointError when `file` is a link out of its checkpoint, whose bytes a build would copy.

    The Hub's cache has links from `snapshots/COMMIT` to `blobs`.
    """
    home, real = directory.resolve(), file.resolve()
    within = [home]
    if home.parent.name == "snapshots":
        within.append(home.parents[1] / "blobs")
    if not any(real.is_relative_to(folder) for folder in within):
        raise CheckpointError(
            f"{file} is a link out of the checkpoint, to {real}", "Put the file itself there"
        )
