"""The target's tokenizer: which files travel with a build, and how they are loaded."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from dflash_trt.errors import CheckpointError

REQUIRED = "tokenizer.json"
OPTIONAL = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)


def tokenizer_files(directory: Path) -> list[Path]:
    """The files to copy, sorted; CheckpointError when there is no tokenizer.json."""
    if not (directory / REQUIRED).is_file():
        raise CheckpointError(
            f"{directory} has no {REQUIRED}",
            "Write it there with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return sorted(
        directory / name for name in (REQUIRED, *OPTIONAL) if (directory / name).is_file()
    )


def copy_tokenizer(target: Path, directory: Path) -> None:
    """Of a target's directory, into `directory/tokenizer`."""
    (directory / "tokenizer").mkdir()
    for file in tokenizer_files(target):
        shutil.copyfile(file, directory / "tokenizer" / file.name)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load tokenizer.json; CheckpointError when it is missing or broken."""
    file = tokenizer_files(directory)[-1].with_name(REQUIRED)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{file} is not a tokenizer ({error})", "Download or export the tokenizer again"
        ) from error
