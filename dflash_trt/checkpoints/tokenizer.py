"""The target's tokenizer: which files travel with a build, and how they are loaded."""

from pathlib import Path

from tokenizers import Tokenizer

from dflash_trt.checkpoints.files import check_inside, read_bytes
from dflash_trt.errors import CheckpointError
from dflash_trt.files import copy_file
from dflash_trt.panics import panics_as_errors

MAX_TOKENIZER = 1 << 26  # bytes; the longest that is published has about 40 MB
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
    """The files to copy, sorted; CheckpointError when there is no tokenizer.json.

    And when one is a link out of the checkpoint.
    """
    if not (directory / REQUIRED).is_file():
        raise CheckpointError(
            f"{directory} has no {REQUIRED}",
            "Write it there with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    files = (directory / name for name in (REQUIRED, *OPTIONAL))
    found = sorted(file for file in files if file.is_file())
    for file in found:
        check_inside(directory, file)
    return found


def copy_tokenizer(target: Path, directory: Path) -> None:
    """Of a target's directory, into `directory/tokenizer`."""
    (directory / "tokenizer").mkdir()
    for file in tokenizer_files(target):
        copy_file(file, directory / "tokenizer" / file.name)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load tokenizer.json; CheckpointError when it is missing or broken."""
    tokenizer_files(directory)
    file = directory / REQUIRED
    data = read_bytes(file, MAX_TOKENIZER)
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{file} is not a tokenizer ({error})", "Download or export the tokenizer again"
        ) from error
    # a file may ask for both, and no prompt may be cut or grow: transformers does neither
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
