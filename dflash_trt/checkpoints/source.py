"""Sources of checkpoints: a directory, or the Hugging Face Hub at a revision.

`huggingface_hub` provides its cache, environment variables (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE,
HF_ENDPOINT), and resuming after a broken connection. Complete files survive a killed download.
"""

import json
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.checkpoints.directory import CARD, MORE_TEMPLATES, check_inside
from dflash_trt.checkpoints.tiktoken_files import CODE, RANKS
from dflash_trt.config import Source
from dflash_trt.errors import CheckpointError
from dflash_trt.planning import published_config
from dflash_trt.weights.gguf import as_directory, find_packaged_file

Report = Callable[[str, int, int], None]  # step, parts done, parts in all

# files that we read, tokenizers included; code never runs: that of a tokenizer holds a pattern. Of
# pickles one, whose name is enough to refuse a drafter (`drafter.MASK_EMBEDDING`)
COPIED = ["*.json", "*.jinja", CARD]
FILES_BUT_WEIGHTS = [*COPIED, RANKS, CODE]
FILES = [*FILES_BUT_WEIGHTS, "*.safetensors", "mask_embedding.pt"]
# copies of the weights in other layouts (gpt-oss, Mistral): all folders except templates
NOT_READ = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*.safetensors"]
PROBE_TIMEOUT = 1.0  # seconds


class Located(NamedTuple):
    directory: Path
    commit: str | None  # commit of a Hub source's revision


def locate(
    source: Source, role: str, report: Report, *, weights: bool = True, offline: bool = False
) -> Located:
    """Download what is on the Hub; CheckpointError if it fails.

    Offline, or if the Hub does not answer: the last commit seen, if it is in the cache.
    """
    if source.path is not None:
        return Located(source.path, None)
    if source.gguf is not None:
        file = find_packaged_file(source.package, source.gguf) if source.package else source.gguf
        return Located(as_directory(file), None)
    # imported here: it takes longer than everything else in a finished build
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    assert source.hub is not None
    try:
        directory = Path(
            snapshot_download(
                source.hub,
                revision=source.revision,
                allow_patterns=FILES if weights else FILES_BUT_WEIGHTS,
                ignore_patterns=NOT_READ,
                local_files_only=offline or _hub_status() is None,
                tqdm_class=_reporting_bars(f"fetching {source.hub}", report),
            )
        )
    except Exception as error:  # exceptions of the library, httpx, the system and Rust code
        raise _download_error(error, source, role) from error
    return Located(directory, directory.name)


def locate_config(source: Source, role: str, report: Report, scratch: Path) -> Located:
    """Find a model's small files; of a published one without the Hub too, as the package has it.

    scratch: a directory for what the package has, config.json alone.
    """
    offline = published_config(source.hub or "") is not None and not hub_answers()
    try:
        return locate(source, role, report, weights=False, offline=offline)
    except CheckpointError as error:
        if not offline:
            raise
        return packaged_config(source, role, scratch, error)


def packaged_config(source: Source, role: str, scratch: Path, error: CheckpointError) -> Located:
    """Write a published model's config.json to `scratch`; raises the error if it is not known."""
    values = published_config(source.hub or "")
    if values is None:
        raise error
    print(f"{role}: {error.problem}; taken as the package has it", file=sys.stderr)
    (scratch / role).mkdir()
    (scratch / role / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return Located(scratch / role, None)


def hub_answers() -> bool:
    """Ask once: without a network `huggingface_hub` may try again and again."""
    return _hub_status() not in (None, 502, 503, 504)


def _hub_status() -> int | None:
    """Return the HTTP status of the Hub's first page; None without a connection, or offline."""
    from huggingface_hub import constants  # noqa: PLC0415

    return None if constants.HF_HUB_OFFLINE else _status_of(constants.ENDPOINT)


@cache
def _status_of(endpoint: str) -> int | None:
    from huggingface_hub import get_session  # noqa: PLC0415

    try:
        return get_session().head(endpoint, timeout=PROBE_TIMEOUT).status_code
    except Exception:  # of httpx, the system and proxies
        return None


def small_files(directory: Path) -> list[Path]:
    """Return what a copy takes besides weights; CheckpointError for a link to outside."""
    files = [file for file in directory.iterdir() if file.is_file()]
    files += directory.glob(MORE_TEMPLATES)
    small = []
    for file in files:
        if any(fnmatch(file.name, pattern) for pattern in COPIED):
            check_inside(directory, file)
            small.append(file)
    return sorted(small)


def locate_argument(argument: str, role: str, report: Report, scratch: Path) -> Path:
    """Return a command's directory argument: a path, or ORG/NAME@REVISION on the Hub.

    Without the Hub of a published model only what `locate_config` finds.
    """
    path = Path(argument)
    hub = re.fullmatch(r"([\w.-]+/[\w.-]+)@(.+)", argument)
    packaged = re.fullmatch(r"([A-Za-z]\w*):(.+)", argument)
    if path.is_dir():
        return path
    if path.suffix in (".yaml", ".yml"):
        raise CheckpointError(
            f"the {role} {argument} is a config, which names a target and a drafter",
            "Give the two themselves, or run `dflash-trt build` with the config",
        )
    if path.is_file():
        source = Source(gguf=path)
    elif hub and not path.exists():
        source = Source(hub=hub[1], revision=hub[2])
    elif packaged and not path.exists():
        source = Source(package=packaged[1], gguf=Path(packaged[2]))
    else:
        raise CheckpointError(
            f"the {role} {argument} is not a directory",
            "Give a Hugging Face model directory, ORG/NAME@REVISION for one on the Hub, or a GGUF "
            "file",
        )
    if published_config(source.hub or "") is not None and not hub_answers():
        return locate_config(source, role, report, scratch).directory
    return locate(source, role, report).directory


def _reporting_bars(step: str, report: Report) -> Any:
    """Return a progress-bar class for `huggingface_hub` that only reports."""
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.shown = step
            self.size = 1
            if options.get("unit") == "B":
                # a total that grows as files begin suits a bar, not a log line
                is_whole = options.get("name") == "huggingface_hub.snapshot_download"
                self.shown = f"{step}, MB" if is_whole and sys.stderr.isatty() else ""
                self.size = 1_000_000
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.shown:
                total = int(self.total or 0) // self.size
                report(self.shown, min(int(self.n) // self.size, total), total)

    return Bar


def _download_error(error: Exception, source: Source, role: str) -> CheckpointError:
    from huggingface_hub import constants, errors  # noqa: PLC0415

    status = getattr(getattr(error, "response", None), "status_code", None)
    cause = error if status else error.__cause__ or error
    reason = " ".join(str(cause).split())[:300] or type(cause).__name__
    if isinstance(cause, errors.LocalEntryNotFoundError):
        reason = "no connection, and nothing of it is in the cache"
    # a thread without a connection closed the session of this one
    if isinstance(cause, AttributeError) or "client has been closed" in reason:
        reason = "no connection"
    fix = "Check the network, HF_ENDPOINT and the disk of HF_HOME, then run it again; complete "
    fix += "files are kept"
    missing = errors.RepositoryNotFoundError | errors.RevisionNotFoundError
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{source.hub}"
        fix = f"Accept the terms on {page} and set HF_TOKEN to a token of that account"
    elif isinstance(error, missing) or status in (401, 403):
        fix = f"Correct {role}.hub or {role}.revision, or set HF_TOKEN to a token that may read it"
    elif constants.HF_HUB_OFFLINE:
        fix = (
            f"Unset HF_HUB_OFFLINE, or run `hf download {source.hub} --revision {source.revision}`"
        )
    return CheckpointError(
        f"cannot fetch the {role} {source.hub} at {source.revision!r} from {constants.ENDPOINT}: "
        f"{reason}",
        fix,
    )
