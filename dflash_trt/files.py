"""Files: safe reading of those of others, digests, and directories that appear whole or not at all.

Read are regular files only, limited in size and depth; a bad file raises OSError, bad content
ValueError. A digest is SHA-256, or BLAKE3 from `LARGE` bytes on (as `b3sum` prints it): without SHA
instructions SHA-256 takes several times as long as writing the file.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import yaml
from blake3 import blake3
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from dflash_trt.errors import BuildError

MAX_JSON = 32 << 20  # bytes; the largest index of a published model has about 24 MB
MAX_YAML = 1 << 18  # parsing takes about 10 s for a megabyte
MAX_DEPTH = 100  # nesting of lists and objects: each level takes stack in recursive code
MAX_NODES = 100_000  # of a YAML file with aliases expanded, which may be very many

EXACT = ConfigDict(strict=True, extra="forbid")  # for `read_as`: no "1" for 1, no unknown field
Size = Annotated[int, Field(ge=1, lt=1 << 48)]
Kind = TypeVar("Kind")
_adapter: Callable[[Any], TypeAdapter[Any]] = lru_cache(TypeAdapter)  # making one takes 40 ms


def read_bytes(file: Path, limit: int = MAX_JSON) -> bytes:
    """Read a file; OSError if it is not regular, or has more than `limit` bytes."""
    with open_regular(file) as stream:
        if (size := os.fstat(stream.fileno()).st_size) > limit:
            shown = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
            raise OSError(errno.EFBIG, f"it has more than {shown}", str(file))
        return stream.read(size)


def open_regular(file: Path) -> io.FileIO:
    """Open a file for reading, unbuffered; OSError if it is not regular."""
    # opening a pipe would block, and a device may never end
    stream = io.FileIO(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return stream


def read_text(file: Path, limit: int = MAX_JSON) -> str:
    """Read UTF-8 text; UnicodeDecodeError is a ValueError."""
    return read_bytes(file, limit).decode("utf-8")


def read_json(file: Path, **options: Any) -> Any:
    return parse_json(read_bytes(file), **options)


def parse_json(text: bytes | str, **options: Any) -> Any:
    """Return the result of `json.loads`; ValueError for any error, deep nesting included."""
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    inner: Iterable[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return value
        inner = chain.from_iterable(x.values() if isinstance(x, dict) else x for x in level)
    raise ValueError("it is nested too deeply")


def read_as(file: Path, kind: type[Kind]) -> Kind:
    """Read a JSON file as a dataclass or type; ValueError says what does not fit."""
    try:
        value: Kind = _adapter(kind).validate_json(read_bytes(file))
        return value
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def compose_yaml(text: str) -> yaml.Node | None:
    """Return a YAML document's nodes, limited in number; ValueError or yaml.YAMLError."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    count, level = 0, [root]
    for _ in range(MAX_DEPTH):
        level = list(chain.from_iterable(_children(node) for node in level))
        count += len(level)
        if not level:
            return root
        if count > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} values")
    raise ValueError("it is nested too deeply")


def parse_yaml(root: yaml.Node | None) -> Any:
    """Return the value of the nodes; ValueError or yaml.YAMLError."""
    try:
        return yaml.SafeLoader("").construct_document(root) if root else None
    except yaml.YAMLError:
        raise
    except Exception as error:  # for values such as `!!bool x` the library raises any type
        raise ValueError(f"a value in it cannot be read ({error})") from None


def read_yaml_beside(module_file: str, name: str) -> Any:
    return yaml.safe_load(Path(module_file).with_name(name).read_text("utf-8"))


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def copy_file(source: Path, destination: Path) -> None:
    """Copy a file, with permissions no wider than its own."""
    shutil.copyfile(source, destination)
    mode = source.stat().st_mode | stat.S_IRUSR | stat.S_IWUSR
    destination.chmod(destination.stat().st_mode & mode & 0o777)


def _children(node: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [item for pair in node.value for item in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


# --- digests ------------------------------------------------------------------------------------

LARGE = 1 << 28

Entry = dict[str, str | int]  # a file in a manifest: digest by kind, and size


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def digest_for(size: int) -> tuple[str, Hash]:
    if size < LARGE:
        return "sha256", hashlib.sha256()
    return "blake3", blake3()


def manifest_entry(file: Path) -> Entry:
    size = file.stat().st_size
    kind, digest = digest_for(size)
    with open_regular(file) as stream:
        # not blake3's memory map: its pages would count as memory of the build
        hashlib.file_digest(stream, lambda: digest)  # type: ignore[arg-type,return-value]
    return {kind: digest.hexdigest(), "size": size}


def sha256_of_concatenated(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open_regular(file) as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


# --- directories that appear whole or not at all ------------------------------------------------


@contextmanager
def sole_writer(output: Path) -> Iterator[Path]:
    """Lock `output` and yield an empty directory beside it to build in; `publish` moves it in.

    Removes leftovers of killed builds first, and its own last. Raises BuildError if another process
    holds the lock.
    """
    scratch, aside = _beside(output, "building"), _beside(output, "replaced")
    with _locked(output):
        if aside.exists() and not output.exists():
            aside.rename(output)  # killed between the two renames of `publish`
        _remove(scratch, aside)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            _remove(scratch, aside)


def publish(scratch: Path, output: Path) -> None:
    """Sync `scratch` to disk, then replace `output` by it."""
    for folder, _, files in os.walk(scratch):
        for path in (*(Path(folder, name) for name in files), Path(folder)):
            _sync(path)
    aside = _beside(output, "replaced")
    if output.exists():
        output.rename(aside)
    scratch.rename(output)
    _sync(output.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically; OSError on failure. The last of several writers wins."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _beside(output: Path, what: str) -> Path:
    return output.with_name(f".{output.name}.dflash-trt-{what}")


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    path = _beside(output, "lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                break  # otherwise the last holder unlinked it after we opened it
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            raise BuildError(
                f"another build of {output} is running",
                "Wait for it, or give this one another --output",
            ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _remove(*directories: Path) -> None:
    for directory in directories:
        if directory.exists():
            shutil.rmtree(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
