"""Package lock: an image's packages with the hashes of their files, as another tool resolved them.

Read is pip's own format, which `pip-compile --generate-hashes` and `uv pip compile` write.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dflash_trt.errors import ConfigError
from dflash_trt.files import read_text

MAX_BYTES = 4 << 20
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
EXACT = re.compile(r"==[^*]+")
FIX = "Write it with `pip-compile --generate-hashes BUILD/requirements.txt`"


@dataclass(frozen=True)
class LockedPackage:
    name: str
    requirement: str  # of pip, with version and marker
    sha256: list[str]  # of the files that may be installed

    @property
    def line(self) -> str:
        """The package as a line of pip's requirements."""
        return " ".join([self.requirement, *(f"--hash=sha256:{digest}" for digest in self.sha256)])


def read_package_lock(file: Path, pins: Mapping[str, str]) -> dict[str, LockedPackage]:
    """Return the packages of a lock by name, in order.

    pins: pip's requirement of each package that the image needs. Raises ConfigError for a file that
    is unreadable, lacks a package or a hash, or has another version than a pin.
    """
    try:
        text = read_text(file, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read package_lock {file}: {error}", FIX) from error
    packages = {package.name: package for package in _packages(file, text)}
    for name, pin in pins.items():
        _check_pinned(file, packages.get(name), Requirement(pin))
    return dict(sorted(packages.items()))


def _packages(file: Path, text: str) -> Iterator[LockedPackage]:
    without_comments = re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE)
    for line in without_comments.replace("\\\n", " ").splitlines():
        line = line.strip()
        if line and not line.startswith("-"):  # options, such as another index
            yield _package(file, line)


def _package(file: Path, line: str) -> LockedPackage:
    digests = HASH.findall(line)
    text = line.partition(" --")[0].strip()
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ConfigError(f"package_lock {file} has {text!r:.100}: {error}", FIX) from error
    if not EXACT.fullmatch(str(requirement.specifier)):
        raise ConfigError(f"package_lock {file} has {text!r:.100}, which is no exact version", FIX)
    if not digests:
        raise ConfigError(f"package_lock {file} has no SHA-256 of {requirement.name}", FIX)
    return LockedPackage(canonicalize_name(requirement.name), str(requirement), digests)


def _check_pinned(file: Path, package: LockedPackage | None, pin: Requirement) -> None:
    if package is None:
        raise ConfigError(f"package_lock {file} lacks {pin.name}, which the image needs", FIX)
    locked = str(Requirement(package.requirement).specifier)
    if not pin.specifier.contains(locked.removeprefix("=="), prereleases=True):
        raise ConfigError(f"package_lock {file} has {pin.name}{locked}, the image needs {pin}", FIX)
